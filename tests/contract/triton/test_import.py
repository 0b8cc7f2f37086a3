"""The gateway loads this backend in a thread beside its loop."""

import subprocess
import sys

from tests.support.process import ROOT

CODE = """
import asyncio
async def main():
    module = await asyncio.to_thread(__import__, "backends.triton_connect")
asyncio.run(main())
"""


def test_it_can_be_loaded_in_a_thread_without_a_loop() -> None:
    subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, check=True, timeout=60)
