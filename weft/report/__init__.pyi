from weft.report.page import render_report as render_report, write_report as write_report
from weft.report.results import read_results as read_results, Results as Results
