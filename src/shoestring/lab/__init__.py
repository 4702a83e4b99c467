"""Models, data, runs, records and reports for studies; users of the library do not need them."""
