"""`striped report`: one page of figures from JSON result files. Measures nothing."""
