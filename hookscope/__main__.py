"""Run the command line: `python -m hookscope`."""

from hookscope.cli.app import main

main()
