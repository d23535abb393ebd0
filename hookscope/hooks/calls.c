/* The hooks of calls.py for the usual call: plain tensors in and out, and no backward pass under way. Any other call is left
 * to Python, before anything is recorded.
 *
 * They are compiled because hooks run between the network's kernels, which fill the caches: the interpreter's code and
 * data for a hook come from memory each time, and take several times as long as the hook does alone.
 */

#include "observing.h"
#include "watching.h"

/* Calls with more inputs are left to Python. */
#define MOST_INPUTS 64
#define ANY (-1)
#define ITS_OWN (-2)
#define NO_TASK (-1)

/* What `self` holds: first what is alike for all captures, in the order of `_ALIKE` in calls.py, then in that of
 * `CallHooks.fastest`. OBSERVING and WATCHING are the `Parts` of an observer that is compiled and of a watch, or None. */
enum {
    TENSOR, PARAMETER, MODULE_CALL, OBSERVATION, ENTRY,
    TASK, HAS_GRADIENTS,
    ENTER, EXIT, NAMES, VERSION, REPLACED,
    LIST, ALIASES, NONE, TRUE, FALSE, EMPTY, PATHS, LIST_PATHS,
    HOOKS, PYTHON, VALUE, OBSERVING, WATCHING, ACQUIRE, RELEASE, COUNTS, OBSERVATIONS, KNOWN, BYPASS
};

/* The items of `ModuleCall` and of `Entry`. */
enum { CALL_LAYER, CALL_MODULE, CALL_NUMBER, CALL_INPUTS, CALL_OPERATION, CALL_ITEMS };
enum { ENTRY_FRAME, ENTRY_CALL, ENTRY_VERSIONS, ENTRY_ARGS, ENTRY_SOURCES, ENTRY_ITEMS };

/* A call that begins or ends. */
typedef struct {
    Parts self;
    Object *layer, *module, *output;
    Object *number, *made; /* of the call, counted from 0, and its `ModuleCall`, NULL until it is needed */
    int overwrites;
    Object *bypass;
    Object *inputs[MOST_INPUTS], *paths; /* of the inputs, as `tensors_given` names them */
    i64 input_count;
    i64 version; /* of the output */
    Owned owned;
} Call;

/* Return a named tuple of a class with these fields; NULL as `tuple_of` does. */
static Object *record(Call *call, i64 class, Object *const *fields, i64 count) {
    Object *items = tuple_of(&call->owned, fields, count);
    return items ? own(&call->owned, named(call->self[class], items)) : 0;
}

/* Tell whether a function returns an object. */
static int returns(Parts self, i64 function, i64 object) {
    return is(py->call(self[function], 0, 0, 0), self[object]);
}

/* Return what a function without arguments returns, an integer; -1 on an error. */
static i64 integer_of(Parts self, i64 function) {
    Object *returned = py->call(self[function], 0, 0, 0);
    i64 value = returned ? py->value(returned) : -1;
    py->drop(returned);
    return value;
}

static int is_plain(Parts self, Object *value) {
    Object *type = py->type(value);
    py->drop(type); /* its instance keeps it */
    return type == self[TENSOR] || type == self[PARAMETER];
}

static int watches(Parts self) { return self[WATCHING] != self[NONE]; }

/* Tell whether an object is a list: its subclasses are left to Python. */
static int is_list(Parts self, Object *value) { return is(py->type(value), self[LIST]); }

/* Tell whether `GradientWatch.note_inputs` may find aliases. */
static int has_aliases(Parts self) {
    Object *aliases = watches(self) ? py->attribute(parts_of(self[WATCHING])[WATCH_SELF], self[ALIASES]) : 0;
    i64 count = aliases ? py->size(aliases) : 0;
    py->drop(aliases);
    return count != 0;
}

/* Read the arguments of a module, tensors or one list of them; tell whether they are those of a usual call. */
static int takes_plain(Call *call, Object *args, Object *kwargs) {
    Parts self = call->self;
    if (py->dict_length(kwargs)) return 0;
    call->input_count = py->length(args);
    if (call->input_count < 0) py->clear(); /* not a tuple */
    Object *list = call->input_count == 1 && is_list(self, py->item(args, 0)) ? py->item(args, 0) : 0;
    if (list) call->input_count = py->list_length(list);
    call->paths = self[list ? LIST_PATHS : PATHS];
    if (call->input_count < 1 || call->input_count > MOST_INPUTS) return 0;
    for (i64 at = 0; at < call->input_count; at++) {
        call->inputs[at] = list ? py->list_item(list, at) : py->item(args, at);
        py->hold(own(&call->owned, call->inputs[at])); /* another thread may change the list */
        if (!is_plain(self, call->inputs[at])) return 0;
    }
    return call->input_count == 1 || !has_aliases(self);
}

/* Tell whether nothing is under way that needs Python's attention. */
static int is_usual(Parts self) {
    /* There is no task outside of backward passes, in which checkpointing recomputes. */
    return integer_of(self, TASK) == NO_TASK && (!watches(self) || returns(self, HAS_GRADIENTS, TRUE));
}

/* Read a tensor's version; tell whether it has one: inference tensors have none. */
static int read_version(Parts self, Object *tensor, i64 *version) {
    Object *read = py->attribute(tensor, self[VERSION]);
    if (!read) {
        py->clear();
        return 0;
    }
    *version = py->value(read);
    py->drop(read);
    return 1;
}

/* Return where a tensor at a version, perhaps the one it has, was shown, a list that is borrowed; NULL if it is not known. */
static Object *shown_at(const Call *call, Object *tensor, i64 version) {
    Object *key = py->identity(tensor);
    Object *entry = key ? py->lookup(call->self[KNOWN], key) : 0;
    py->drop(key);
    if (!entry) return 0;
    Object *there = py->call(py->item(entry, 0), 0, 0, 0);
    py->drop(there); /* the caller of the hook holds the tensor */
    if (there != tensor || (version == ITS_OWN && !read_version(call->self, tensor, &version))) return 0;
    return version == ANY || py->value(py->item(entry, 1)) == version ? py->item(entry, 2) : 0;
}

/* As `Identities.sources`. */
static Object *sources_of(Call *call) {
    Parts self = call->self;
    Object *found[MOST_INPUTS];
    if (self[BYPASS] == self[NONE]) return tuple_of(&call->owned, found, 0);
    Object *names = own(&call->owned, py->attribute(self[HOOKS], self[NAMES]));
    for (i64 at = 0; names && at < call->input_count; at++) {
        Object *shown = shown_at(call, call->inputs[at], call->overwrites ? ANY : ITS_OWN);
        if (shown && py->list_length(shown) > 0) {
            found[at] = py->list_item(shown, 0);
        } else {
            Object *key = own(&call->owned, py->identity(call->inputs[at]));
            found[at] = key ? own(&call->owned, py->element(names, key)) : 0;
        }
        if (!found[at]) return 0;
    }
    return names ? tuple_of(&call->owned, found, call->input_count) : 0;
}

/* As `Identities.show`: return what the output repeats, NULL on an error, and set whether it is an unchanged input. */
static Object *show(Call *call, Object *place, int *passed_through) {
    Parts self = call->self;
    Object *shown = shown_at(call, call->output, call->version);
    *passed_through = 0;
    for (i64 at = 0; at < call->input_count && !call->overwrites; at++)
        if (call->inputs[at] == call->output || (shown && shown_at(call, call->inputs[at], ITS_OWN) == shown))
            *passed_through = 1;
    if (!shown) {
        Object *entry[] = {own(&call->owned, py->reference(call->output, 0)),
                           own(&call->owned, py->integer(call->version)), acyclic(list_of(&call->owned, place))};
        Object *known = acyclic(tuple_of(&call->owned, entry, 3)), *key = own(&call->owned, py->identity(call->output));
        if (!known || !key || py->store(self[KNOWN], key, known)) return 0;
    } else if (!py->list_length(shown)) {
        if (py->append(shown, place)) return 0;
    } else if (*passed_through) {
        Object *first = py->list_item(shown, 0);
        py->hold(first);
        return own(&call->owned, first);
    }
    return self[NONE];
}

/* Return the `ModuleCall`; NULL on an error. */
static Object *made_of(Call *call) {
    if (call->made) return call->made;
    Object *inputs = list_of(&call->owned, 0);
    for (i64 at = 0; inputs && at < call->input_count; at++) {
        Object *pair[] = {py->item(call->paths, at), call->inputs[at]}, *given = tuple_of(&call->owned, pair, 2);
        if (!given || py->append(inputs, given)) return 0;
    }
    Object *fields[CALL_ITEMS] = {call->layer, call->module, call->number, inputs, call->self[NONE]};
    return call->made = record(call, MODULE_CALL, fields, CALL_ITEMS);
}

/* As `CallHooks.value`. */
static Object *observed(Call *call) {
    Parts self = call->self;
    Object *value = 0;
    if (self[OBSERVING] != self[NONE])
        value = own(&call->owned, observe_output(self[OBSERVING], call->module, call->output, call->version));
    if (value || !made_of(call)) return value;
    Object *given[] = {call->made, self[EMPTY], call->output};
    return own(&call->owned, py->call(self[VALUE], given, 3, 0));
}

/* As `CallHooks._begin`: count the call; tell whether that was done. */
static int begin(Call *call) {
    Parts self = call->self;
    Object *before = py->lookup(self[COUNTS], call->layer);
    i64 number = before ? py->value(before) : 0;
    Object *next = own(&call->owned, py->integer(number + 1));
    if (!next || py->store(self[COUNTS], call->layer, next)) return 0;
    call->number = own(&call->owned, py->integer(number));
    return call->number != 0;
}

/* Watch the gradient of the output; return its replacement, None to keep it. */
static Object *watched(Call *call) {
    Parts self = call->self;
    Object *watching = self[WATCHING];
    if (watching == self[NONE]) return self[NONE];
    Object *made = made_of(call), *inputs = made ? py->item(made, CALL_INPUTS) : 0;
    if (!made) return 0;
    int is_input = 0;
    for (i64 at = 0; at < call->input_count; at++) is_input |= call->inputs[at] == call->output;
    if (call->overwrites || !is_input) {
        int is_done = watch_output(&call->owned, watching, made, call->output, call->version);
        if (is_done) return is_done > 0 ? self[NONE] : 0;
    }
    Object *pair[] = {self[EMPTY], call->output};
    Object *outputs = list_of(&call->owned, tuple_of(&call->owned, pair, 2));
    Object *given[] = {made, call->output, outputs, call->overwrites ? list_of(&call->owned, 0) : inputs};
    if (!outputs || !given[3]) return 0;
    Object *result = own(&call->owned, py->call(parts_of(watching)[WATCH_OUTPUTS], given, 4, 0));
    Object *replaced[] = {self[HOOKS], outputs, result};
    if (result && result != self[NONE] && !own(&call->owned, py->method(self[REPLACED], replaced, 3, 0))) return 0;
    return result;
}

/* As `CallHooks._finish`: record what the call has returned, and watch it. */
static Object *ended(Call *call, Object *sources) {
    Parts self = call->self;
    Object *where[] = {call->layer, call->number, self[EMPTY]}, *place = acyclic(tuple_of(&call->owned, where, 3));
    if (!sources || !place) return 0;
    int passed_through;
    Object *repeats = show(call, place, &passed_through);
    Object *value = repeats ? observed(call) : 0;
    Object *seen[] = {place,
                      value,
                      self[passed_through ? TRUE : FALSE],
                      self[call->overwrites ? TRUE : FALSE],
                      repeats,
                      self[NONE],
                      sources};
    Object *observation = record(call, OBSERVATION, seen, 7);
    if (self[OBSERVING] != self[NONE]) acyclic(observation); /* what other observers return may lead to it */
    if (!observation || py->append(self[OBSERVATIONS], observation)) return 0;
    return watched(call);
}

/* Take the lock, and bypass torch function modes; return 0 on an error, which `leave` expects, too. */
static int enter(Call *call) {
    Parts self = call->self;
    call->bypass = call->number = call->made = 0;
    if (!own(&call->owned, py->call(self[ACQUIRE], 0, 0, 0))) return 0;
    call->bypass = self[NONE];
    if (self[BYPASS] != self[NONE]) {
        call->bypass = own(&call->owned, py->call(self[BYPASS], 0, 0, 0));
        if (call->bypass && !own(&call->owned, py->method(self[ENTER], &call->bypass, 1, 0))) call->bypass = 0;
        if (!call->bypass) {
            always(py->call, self[RELEASE], 0, 0);
            return 0;
        }
    }
    return 1;
}

/* Leave a call to Python, of which nothing is recorded. */
static Object *left(Call *call, Object *const *given, i64 count) {
    give_back(&call->owned);
    py->clear();
    return py->call(call->self[PYTHON], given, count, 0);
}

/* Undo `enter`, and return the result of the hook. */
static Object *leave(Call *call, Object *result) {
    Parts self = call->self;
    if (result) py->hold(result);
    if (call->bypass) {
        Object *exit[] = {call->bypass, self[NONE], self[NONE], self[NONE]};
        if (call->bypass != self[NONE]) always(py->method, self[EXIT], exit, 4);
        always(py->call, self[RELEASE], 0, 0);
    }
    give_back(&call->owned);
    return result;
}

/* The hooks: functions of Python's, of the kind METH_FASTCALL. Each is given what its Python one is. */

/* `CallHooks.only`. */
EXPORT Object *only(Object *parts, Object *const *given, i64 count) {
    enum { LAYER, OVERWRITES, MODULE, ARGS, KWARGS, OUTPUT, ARGUMENTS };
    Call seen, *call = &seen;
    Parts self = call->self = parts_of(parts);
    call->owned.count = 0;
    if (count != ARGUMENTS || !is_plain(self, given[OUTPUT]) || !takes_plain(call, given[ARGS], given[KWARGS]) ||
        !is_usual(self))
        return left(call, given, count);
    call->layer = given[LAYER];
    call->module = given[MODULE];
    call->output = given[OUTPUT];
    call->overwrites = given[OVERWRITES] == self[TRUE];
    int is_left = 0;
    Object *result = 0;
    if (enter(call)) {
        is_left = !read_version(self, call->output, &call->version);
        if (!is_left && begin(call)) result = ended(call, sources_of(call));
    }
    result = leave(call, result);
    return is_left ? left(call, given, count) : result;
}

/* Return a list of the versions of the inputs, NULL if one has none; perhaps with an error. */
static Object *versions_of(Call *call) {
    Object *versions = list_of(&call->owned, 0);
    for (i64 at = 0; versions && at < call->input_count; at++) {
        i64 read;
        Object *version = read_version(call->self, call->inputs[at], &read) ? own(&call->owned, py->integer(read)) : 0;
        if (!version || py->append(versions, version)) return 0;
    }
    return versions;
}

/* `CallHooks.before`. */
EXPORT Object *before(Object *parts, Object *const *given, i64 count) {
    enum { LAYER, ENTRIES, MODULE, ARGS, KWARGS, ARGUMENTS };
    Call seen, *call = &seen;
    Parts self = call->self = parts_of(parts);
    call->owned.count = 0;
    if (count != ARGUMENTS || !takes_plain(call, given[ARGS], given[KWARGS]) || !is_usual(self))
        return left(call, given, count);
    call->layer = given[LAYER];
    call->module = given[MODULE];
    call->output = 0;
    call->overwrites = 0;
    int is_left = 0;
    Object *result = 0;
    if (enter(call)) {
        Object *versions = versions_of(call);
        is_left = !versions;
        Object *made = versions && begin(call) ? made_of(call) : 0;
        Object *frame = made ? own(&call->owned, py->identity(py->frame())) : 0;
        Object *fields[ENTRY_ITEMS] = {frame, made, versions, given[ARGS], frame ? sources_of(call) : 0};
        Object *entry = record(call, ENTRY, fields, ENTRY_ITEMS);
        if (entry && !py->append(given[ENTRIES], entry)) result = self[NONE];
    }
    result = leave(call, result);
    return is_left ? left(call, given, count) : result;
}

/* Return the place of the entry of the frame that calls this hook; -1 if there is none. */
static i64 place_of(Object *entries) {
    i64 at = py->list_length(entries);
    while (at-- && py->value(py->item(py->list_item(entries, at), ENTRY_FRAME)) != (i64)py->frame());
    return at;
}

/* Read the inputs of a call that has begun, from its `ModuleCall`; tell whether all are plain. */
static int took_plain(Call *call, Object *made) {
    Parts self = call->self;
    Object *inputs = py->item(made, CALL_INPUTS);
    call->input_count = is_list(self, inputs) ? py->list_length(inputs) : 0;
    if (call->input_count < 1 || call->input_count > MOST_INPUTS) return 0;
    for (i64 at = 0; at < call->input_count; at++) {
        call->inputs[at] = py->item(py->list_item(inputs, at), 1);
        if (!is_plain(self, call->inputs[at])) return 0;
    }
    return 1;
}

/* `CallHooks.after`. */
EXPORT Object *after(Object *parts, Object *const *given, i64 count) {
    enum { ENTRIES, MODULE, ARGS, KWARGS, OUTPUT, ARGUMENTS };
    Call seen, *call = &seen;
    Parts self = call->self = parts_of(parts);
    call->owned.count = 0;
    i64 at = count == ARGUMENTS ? place_of(given[ENTRIES]) : -1;
    Object *entry = at < 0 ? 0 : py->list_item(given[ENTRIES], at), *made = entry ? py->item(entry, ENTRY_CALL) : 0;
    if (entry) py->hold(own(&call->owned, entry)); /* the list is that of all threads */
    if (!entry || py->item(entry, ENTRY_ARGS) != given[ARGS] || !is_plain(self, given[OUTPUT]) ||
        !took_plain(call, made) || !is_usual(self))
        return left(call, given, count);
    call->layer = py->item(made, CALL_LAYER);
    call->module = given[MODULE];
    call->output = given[OUTPUT];
    call->overwrites = 0;
    int is_left = 0;
    Object *result = 0;
    if (enter(call)) {
        call->number = py->item(made, CALL_NUMBER);
        call->made = made;
        is_left = !read_version(self, call->output, &call->version);
        Object *versions = py->item(entry, ENTRY_VERSIONS);
        for (i64 each = 0; !is_left && each < call->input_count; each++) {
            i64 version = ANY;
            is_left = !read_version(self, call->inputs[each], &version);
            call->overwrites |= py->value(py->list_item(versions, each)) != version;
        }
        if (!is_left && !py->remove(given[ENTRIES], place_of(given[ENTRIES])))
            result = ended(call, py->item(entry, ENTRY_SOURCES));
    }
    result = leave(call, result);
    return is_left ? left(call, given, count) : result;
}
