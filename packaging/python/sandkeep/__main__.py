"""`python -m sandkeep` is `keep`."""

import os
import sys

from sandkeep._program import find


def main() -> None:
    program = find()
    os.execv(program, [program, *sys.argv[1:]])


main()
