"""An agent on the OpenAI Agents SDK with one tool; run in the SDK's environment, not in gristmill's.

`agent_program.py chat|responses stream|body MODEL TASK HISTORY_FILE`
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_default_openai_api


@function_tool
def bash(command: str) -> str:
    """Run a shell command and return what it prints."""
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False).stdout


async def main(dialect: str, how: str, model: str, task: str, history: Path) -> None:
    set_default_openai_api("responses" if dialect == "responses" else "chat_completions")
    agent = Agent(name="mender", instructions="You are a coding agent.", tools=[bash], model=model)
    if how == "stream":
        result = Runner.run_streamed(agent, task)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, task)
    items = [item if isinstance(item, dict) else item.model_dump() for item in result.to_input_list()]
    history.write_text(json.dumps({"response": {"output": items}}))


asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], Path(sys.argv[5])))
