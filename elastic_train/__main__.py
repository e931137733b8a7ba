"""``python -m elastic_train``: the command line without the installed script."""

from elastic_train.cli import main

main()
