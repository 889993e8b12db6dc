"""The built-in tasks: copy-paste, copy-paste-multitab and login-demo. Their pages are in `templates`."""

from __future__ import annotations

from typing import Any, ClassVar

from browser_tasks import CustomBrowserGymEnvironment, register_custom_task

TARGET_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Target</title></head>
<body>
<h1>Target</h1>
<form id="form">
  <label>Text <input id="target" autocomplete="off"></label>
  <button id="submit" type="submit">Submit</button>
</form>
<p id="message" role="status"></p>
<script>
document.getElementById("form").addEventListener("submit", event => {
  event.preventDefault();
  const right = document.getElementById("target").value === "Quarterly report 2031, final version";
  document.getElementById("message").textContent = right ? "Success! The text was copied." : "That is another text.";
});
</script>
</body>
</html>
"""
MULTITAB_TEXT = "Quarterly report 2031, final version"


@register_custom_task("copy-paste")
class CopyPaste(CustomBrowserGymEnvironment):
    """Copy the text of the field "Source" into the field "Target", then press Submit."""

    task_name = "copy-paste"
    max_steps = 10

    def _get_html_content(self) -> str:
        return self.read_beside("templates/copy-paste.html")

    def _calculate_reward(self, page_data: dict[str, Any], action: str, error: str | None = None) -> float:
        if error:
            return -0.1
        if self._check_done(page_data):
            return 1.0
        fields = page_data["fields"]
        return 0.5 if fields.get("source") and fields.get("target") == fields["source"] else 0.0

    def _check_done(self, page_data: dict[str, Any]) -> bool:
        return "Success!" in page_data["text"]


@register_custom_task("copy-paste-multitab")
class CopyPasteMultitab(CustomBrowserGymEnvironment):
    """Open the target page, which comes in a tab of its own, enter the source page's text there and press Submit."""

    task_name = "copy-paste-multitab"
    max_steps = 15
    pages: ClassVar[dict[str, str]] = {"/target": TARGET_PAGE}

    def _get_html_content(self) -> str:
        return self.read_beside("templates/copy-paste-multitab.html")

    def _calculate_reward(self, page_data: dict[str, Any], action: str, error: str | None = None) -> float:
        if error:
            return -0.1
        if self._check_done(page_data):
            return 1.0
        if page_data["fields"].get("target") == MULTITAB_TEXT:
            return 0.6
        return 0.3 if page_data["url"].endswith("/target") else 0.0

    def _check_done(self, page_data: dict[str, Any]) -> bool:
        return page_data["url"].endswith("/target") and "Success!" in page_data["text"]


@register_custom_task("login-demo")
class LoginDemo(CustomBrowserGymEnvironment):
    """Log in as the user "demo" with the password "demo123"."""

    task_name = "login-demo"
    max_steps = 10

    def _get_html_content(self) -> str:
        return self.read_beside("templates/login-demo.html")

    def _calculate_reward(self, page_data: dict[str, Any], action: str, error: str | None = None) -> float:
        return 1.0 if self._check_done(page_data) else 0.0

    def _check_done(self, page_data: dict[str, Any]) -> bool:
        return "Signed in as demo" in page_data["text"]
