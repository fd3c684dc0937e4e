"""Translate a corpus: `python jobs/translate.py --config conf/translate.yaml`."""

from pipeline.cli import make_app

app = make_app("translate", "Translate the documents of a Parquet corpus, exactly once each.")

if __name__ == "__main__":
    app()
