"""The page of a run: a run folder is read by `run_reader`, and drawn as a live page, as `report.html` and as `loss.png`.

The base install draws the report. The live page needs the extra `show`.
"""
