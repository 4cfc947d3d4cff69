"""`striped report`: from result files to one page with figures. Reads JSON, measures nothing."""
