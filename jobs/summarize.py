"""Summarise a corpus: `python jobs/summarize.py --config conf/demo.yaml`."""

from pipeline.cli import make_app

app = make_app("summarize", "Summarise the documents of a Parquet corpus, exactly once each.")

if __name__ == "__main__":
    app()
