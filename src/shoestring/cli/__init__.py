"""The command line: verbs that call the library and decide nothing."""
