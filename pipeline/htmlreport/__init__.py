"""`_run/report.html`: one page that says what a run did, from what the run recorded."""

from pipeline.store.plan import RUN_FOLDER

REPORT_NAME = f"{RUN_FOLDER}/report.html"
