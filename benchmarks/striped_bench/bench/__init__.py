"""`striped bench`: named suites of measurements, each of which checks answers first and ends in a JSON document."""
