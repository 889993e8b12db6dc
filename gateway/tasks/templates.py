"""What `gateway tasks new` writes: a task to begin with, for each kind of environment, as YAML, JSON or Python."""

from __future__ import annotations

import json
import re

from envserver.generic.task import ID, NAME

from gateway.core.errors import ConfigError
from gateway.tasks.documents import read_yaml

FORMATS = ("yaml", "json", "python")

_HEAD = """\
# A task of the environment {environment}; docs/tasks.md has the keys that all tasks share.
id: "{id}"
env_type: "{environment}"
name: A sentence for people
description: What it is for, where it comes from
version: "1"
tags: [custom]
"""

_BODIES = {
    "math": """\
# The bare problem; the environment adds how to answer.
instruction: What is 6 times 7?
config:
  max_attempts: 1  # submissions; the last one counts
evaluation:
  # A scorer of reasoning-gym and the entry that it scores by; nothing of it is shown to the agent.
  reward_function: reasoning_gym
  family: basic_arithmetic
  parameters: {{}}
  entry: {{answer: "42", metadata: {{}}}}
""",
    "os": """\
instruction: How many files are in /srv/in?
config:
  max_turns: 8
  init:  # shell scripts that furnish the box before the agent comes
    - mkdir -p /srv/in && touch /srv/in/a /srv/in/b
evaluation:
  match: "2"  # a fixed answer; check, with scripts that look at the box, is in env_images/os/README.md
""",
    "coding": """\
instruction: "Write the function `def double(n: int) -> int`."
config: {{}}
evaluation:
  reward_function: test_cases
  function: double
  test_cases:
    - {{public: true, arguments: [2], output: 4}}  # shown to the agent
    - {{arguments: [-3], output: -6}}  # hidden
""",
    "browser": """\
instruction: Log in as admin with the password 1234.
config:
  max_steps: 10
  start_url: /login
  pages:  # served to the page itself: there is no network
    /login: >-
      <form action="/dashboard"><input id="user"><input id="password" type="password"><button>Log in</button></form>
    /dashboard: <h1>Welcome</h1>
evaluation:
  reward_function: check_url_contains('dashboard')
""",
    "game": """\
instruction: Reach the goal.
config:
  game: grid
  level: {{width: 5, height: 5, walls: 15, seed: 7}}  # or a map of your own, or another game: env_images/game/README.md
  max_turns: 20
evaluation:
  reward_function: efficiency(slack=1.5)
""",
    "chat": """\
instruction: Name the capital of France, in one word.
config:
  max_turns: 1
evaluation:
  # A named function and literal arguments; it is never evaluated.
  reward_function: exact_match('Paris')
""",
    "": """\
instruction: What the agent is to do.
config: {{}}  # the environment's own settings for the session
evaluation:
  # How it is judged: a named function of the environment with literal arguments, or without.
  reward_function: contains('done', case=False)
# rate_limit: {{starts: 10, per_s: 60}}  # for a task that is dear to begin
""",
}

_PYTHON = '''\
"""A task of the environment {environment}, registered as this module is imported.

Put it into the environment's folder of custom tasks and name it in its `environment.toml`; docs/tasks.md says how.
"""

from envserver.generic import registry, reward_function


@reward_function("{function}")
def {function}(answer: str, expected: str) -> float:
    """Score what the agent said, in [0, 1]. Runs in the environment's server, where no agent reaches it."""
    return 1.0 if answer.strip().lower() == expected.lower() else 0.0


registry.register(
    "{id}",
    "{environment}",
    {{
        "instruction": "What the agent is to do.",
        "config": {{}},
        "evaluation": {{"reward_function": "{function}('done')"}},
    }},
)
'''

_BROWSER = '''\
"""A task of the environment {environment}, registered as this module is imported.

Put it into the environment's folder of custom tasks and name it in its `environment.toml`; docs/tasks.md says how.
"""

from typing import Any

from browser_tasks import CustomBrowserGymEnvironment, register_custom_task


@register_custom_task("{name}")
class {class_name}(CustomBrowserGymEnvironment):
    """One page; the agent's actions are BrowserGym's, such as click('12')."""

    task_name = "{name}"
    goal = "What the agent is to do."
    max_steps = 10

    def _get_html_content(self) -> str:
        """The page. A file beside this module does as well: read and return its text."""
        return "<button id='go' onclick=\\"this.textContent = 'gone'\\">go</button>"

    def _calculate_reward(self, page_data: dict[str, Any], action: str, error: str | None = None) -> float:
        """The reward of this step, from what the page is now."""
        return 1.0 if self._check_done(page_data) else 0.0

    def _check_done(self, page_data: dict[str, Any]) -> bool:
        """Whether the episode is over."""
        return "gone" in page_data["text"]
'''


def template(environment: str, *, id: str = "", form: str = "yaml") -> str:
    """A task to begin with; comments say what is to be filled in (JSON has none).

    Args:
        environment: its name; one that is not known gets what all share.
        id: of the task; empty: ``custom/my-task``.
        form: one of `FORMATS`.

    Raises:
        ConfigError: a name that none can have, or another format.
    """
    id = id or "custom/my-task"
    if not NAME.fullmatch(environment):
        raise ConfigError(f"{environment!r} is no environment's name")
    if not ID.fullmatch(id):
        raise ConfigError(f"--id {id}: letters, digits and ._-/ are taken, at most 200, a letter or digit first")
    if form == "python":
        return _python(environment, id)
    if form not in FORMATS:
        raise ConfigError(f"--format {form}: one of {', '.join(FORMATS)} is wanted")
    text = (_HEAD + _BODIES.get(environment, _BODIES[""])).format(environment=environment, id=id)
    return text if form == "yaml" else json.dumps(read_yaml(text.encode()), indent=2, ensure_ascii=False) + "\n"


def _python(environment: str, id: str) -> str:
    name = id.rpartition("/")[2]
    words = [word for word in re.split(r"[^A-Za-z0-9]+", name) if word]
    if environment == "browser":
        class_name = "".join(word.capitalize() for word in words) + "Task"
        class_name = class_name if class_name[0].isalpha() else f"Task{class_name}"
        return _BROWSER.format(environment=environment, name=name, class_name=class_name)
    return _PYTHON.format(environment=environment, id=id, function="judge_" + "_".join(words).lower())
