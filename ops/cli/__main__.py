"""`python -m arriero.ops.cli`: the command `arriero`."""

from arriero.ops.cli import main

main()
