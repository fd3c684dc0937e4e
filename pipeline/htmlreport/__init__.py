"""`_run/report.html`: one page that says what a run did, from what the run recorded."""
