"""A finished run in the forms that people and programs read, and one that is written while it goes on.

document  JSON          junit    JUnit XML                   html         a page of its own
ndjson    line by line  summary  Markdown for a CI service   pytest_file  a failure as a test
joined    a report of what several runs wrote line by line
"""

from attnswitch.verify.report.document import to_json
from attnswitch.verify.report.facts import replay_command
from attnswitch.verify.report.html import to_html
from attnswitch.verify.report.junit import to_junit
from attnswitch.verify.report.ndjson import EventLog
from attnswitch.verify.report.pytest_file import file_name, to_pytest
from attnswitch.verify.report.summary import to_markdown

__all__ = ["EventLog", "file_name", "replay_command", "to_html", "to_json", "to_junit", "to_markdown", "to_pytest"]
