#!/usr/bin/env bash
# The steps of action.yml. `install` puts hookscope into the job's Python unless it is there already; `check` runs it on
# what the variables CHECKPOINTS, CONFIG, BASELINE, DATA and ARGUMENTS say, and tells the outputs.
set -euo pipefail

# Print each line of a text that is not blank, without the blanks around it.
words() {
    sed -e 's/^[[:space:]]*//' -e 's/[[:space:]]*$//' -e '/^$/d' <<< "$1"
}

output() {
    printf '%s=%s\n' "$1" "$2" >> "$GITHUB_OUTPUT"
}

# Tell the path of a file if it was written.
output_file() {
    if [ -s "$2" ]; then output "$1" "$2"; else output "$1" ""; fi
}

install() {
    if python -P -c 'import hookscope' 2> /dev/null; then
        return
    fi
    # A version with "+cpu" is the newer one to pip, so it takes the build without CUDA where there is one.
    python -m pip install --extra-index-url "$TORCH_INDEX" "$GITHUB_ACTION_PATH"
}

check() {
    local options=() checkpoints=() word folder status=0 verdict
    while IFS= read -r word; do checkpoints+=("$word"); done < <(words "$CHECKPOINTS")
    while IFS= read -r word; do options+=("$word"); done < <(words "$ARGUMENTS")
    if [ -n "$CONFIG" ]; then options+=(--config "$CONFIG"); fi
    if [ -n "$BASELINE" ]; then options+=(--baseline "$BASELINE"); fi
    if [ -n "$DATA" ]; then options+=(--data "$DATA"); fi

    folder=$(mktemp -d "$RUNNER_TEMP/hookscope.XXXXXX") # a new one: nothing of another run can be taken for this one's
    touch "$folder/summary.md"
    output folder "$folder"
    options+=(--sarif "$folder/check.sarif" --junit "$folder/junit.xml")
    options+=(--report "$folder/report.html" --evidence "$folder/evidence")
    # `${list[@]+…}`: an empty list is an unset variable to the bash of macOS.
    GITHUB_STEP_SUMMARY="$folder/summary.md" python -P -m hookscope check "${options[@]}" -- \
        ${checkpoints[@]+"${checkpoints[@]}"} || status=$?
    cat "$folder/summary.md" >> "$GITHUB_STEP_SUMMARY"

    verdict=error # also of a Python that cannot import hookscope, which ends as a failed check does
    if [ -s "$folder/check.sarif" ]; then
        case $status in
            0) verdict=passed ;;
            1) verdict=failed ;;
        esac
    fi
    output verdict "$verdict"
    output exit-code "$status"
    output_file report "$folder/report.html"
    output_file summary "$folder/summary.md"
    output_file sarif "$folder/check.sarif"
    output_file junit "$folder/junit.xml"
    return "$status"
}

"$1"
