"""``counter``: the smallest environment with a state; sessions must not share it."""

from envserver import Environment, Prompt, StepResult, Task, serve, tool


class Counter(Environment):
    """A task holds ``start`` (int)."""

    name = "counter"

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        self.value: int = task["start"]
        return f"The counter stands at {self.value}."

    @tool
    async def add(self, n: int) -> StepResult:
        """Add n and return the sum."""
        self.value += n
        return StepResult(str(self.value))

    @tool
    async def stop(self) -> StepResult:
        """End the episode; the reward is a tenth of the sum."""
        return StepResult(str(self.value), reward=self.value / 10, finished=True)


if __name__ == "__main__":
    serve(Counter)
