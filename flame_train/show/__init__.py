"""The page of a run: its folder, read by `run_reader`, drawn as a live page, as `report.html` and as `loss.png`.

The base install draws the report. The live page needs the extra `show`.
"""
