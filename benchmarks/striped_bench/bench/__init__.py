"""`striped bench`: named benchmark suites. Each checks its results before timing them and writes a JSON document."""
