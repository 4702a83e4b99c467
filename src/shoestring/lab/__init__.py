"""What studies need and a user of the library does not: models, data, runs, records, reports."""
