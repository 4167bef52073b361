"""`python -m zeroshard` is the `zeroshard` command."""

from zeroshard.launch.cli import main

main()
