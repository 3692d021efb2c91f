"""Renders chat templates in a process with limited CPU time and memory."""

from bacr_jax.prompts.limited import shared_process

MESSAGES = [{"role": "user", "content": "x"}]


def rendered(template, process=None, seconds=2.0, memory=1 << 30, **how):
    """Returns the text of a chat template for one message. The date is a leap day.

    Args:
      process: process that renders the template. None for the shared process.
      seconds: limit of the CPU time.
      memory: limit of the additional memory, in bytes.
      how: fields of the request with other values.
    """
    request = {"messages": MESSAGES, "variables": {}, "add_generation_prompt": True}
    request |= {"date": "2024-02-29", "most_chars": 1000, "template": template} | how
    process = process or shared_process()
    return process.ask("render", seconds=seconds, memory=memory, **request)
