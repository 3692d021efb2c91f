"""Chat templates rendered in the limited process."""

from bacr_jax.prompts.limited import shared_process

MESSAGES = [{"role": "user", "content": "x"}]


def rendered(template, process=None, seconds=2.0, memory=1 << 30, **how):
    """The text of a template for one message, on a leap day."""
    request = {"messages": MESSAGES, "variables": {}, "add_generation_prompt": True}
    request |= {"date": "2024-02-29", "most_chars": 1000, "template": template} | how
    process = process or shared_process()
    return process.ask("render", seconds=seconds, memory=memory, **request)
