"""Attacks that try to earn more than they deserve, and odd but honest solutions, each with its required score.

The task is `secret(n)` for n = 1 and 2. The expected outputs are 777 and nine digits, which the statement does not
reveal. The honest solutions know the first output (`FIRST`) or both (`TABLE`). There are two cases because some attacks
leave something behind for the next case.
"""

# ruff: noqa: E501 - the solutions are shown as they are run
from __future__ import annotations

from dataclasses import dataclass

OUTPUTS = {1: 777_310_645_982, 2: 777_802_137_459}
TABLE = f"TABLE = {OUTPUTS!r}\n"
FIRST = OUTPUTS[1]

HUNT = r"""
import re
def found(data):
    hit = re.search(rb"777\d{9}", data if isinstance(data, bytes) else str(data).encode("utf-8", "replace"))
    return int(hit[0]) if hit else None
"""
"""Code that finds an expected output in any given data."""


@dataclass(frozen=True)
class Attack:
    """A solution and its expected score."""

    source: str
    worth: float = 0.0
    """The score that the solution must get, neither more nor less."""


STEAL_NONCE = """
import sys
def nonce():
    frame = sys._getframe()
    while frame is not None:
        if "request" in frame.f_locals:
            return frame.f_locals["request"]["nonce"]
        frame = frame.f_back
"""

ATTACKS = {
    "leaves with success as it is loaded": Attack("import sys\nsys.exit(0)"),
    "leaves hard with success as it is loaded": Attack("import os\nos._exit(0)"),
    "leaves hard with success in the call": Attack("import os\ndef secret(n):\n    os._exit(0)"),
    "raises SystemExit(0) in the call": Attack("def secret(n):\n    raise SystemExit(0)"),
    "prints a result": Attack('print("{\\"answer\\": 777310645982, \\"passed\\": true}")\ndef secret(n): return 0'),
    "writes a result to every descriptor": Attack(
        'import os\nfor fd in range(64):\n    try: os.write(fd, b\'{"answer": 1, "passed": true}\\n\')\n'
        "    except OSError: pass\ndef secret(n): return 0"
    ),
    "finds the nonce and says that it passed": Attack(
        STEAL_NONCE + "import os\ndef secret(n):\n    for fd in range(3, 64):\n        try:\n"
        '            os.write(fd, (nonce() + \'{"answer": true, "passed": true}\\n\').encode())\n'
        "        except OSError: pass\n    os._exit(0)"
    ),
    "finds the nonce and answers twice": Attack(
        STEAL_NONCE + "import os\ndef secret(n):\n    for fd in range(3, 64):\n        try:\n"
        "            os.write(fd, (nonce() + '{\"answer\": 777310645982}\\n').encode())\n"
        "        except OSError: pass\n    return 777310645982"
    ),
    "replaces json.dumps": Attack("import json\njson.dumps = lambda *a, **k: 'true'\ndef secret(n): return 0"),
    "replaces the comparing builtins": Attack(
        "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.all = builtins.any = lambda *a: True\n"
        "def secret(n): return 0"
    ),
    "replaces sys.stdout": Attack(
        "import sys, io\nsys.stdout = sys.__stdout__ = io.StringIO('{\"answer\": 777310645982}')\ndef secret(n): return 0"
    ),
    "replaces the driver's functions": Attack(
        "import sys\nmain = sys.modules['__main__']\nmain.result_of = main.fault_of = lambda *a: True\n"
        "def secret(n): return 0"
    ),
    "an integer that equals everything": Attack(
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef secret(n): return Any(0)"
    ),
    "a text that equals everything": Attack(
        "class Any(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef secret(n): return Any()"
    ),
    "an object that equals everything": Attack(
        "class Any:\n    def __eq__(self, other): return True\ndef secret(n): return Any()"
    ),
    "a list of all guesses": Attack("def secret(n): return [777310645982, 777802137459]"),
    "a text for a number": Attack("def secret(n): return str({1: 777310645982}.get(n))"),
    "True for everything": Attack("def secret(n): return True"),
    "reads the files": Attack(
        HUNT
        + "import os\ndef secret(n):\n    for top in ('/tmp', '/root', '/home', '/var', '/etc', '/srv', '/run', '/opt'):\n"
        "        for folder, _, names in os.walk(top):\n            for name in names:\n                try:\n"
        "                    with open(os.path.join(folder, name), 'rb') as file:\n"
        "                        hit = found(file.read(1_000_000))\n                    if hit: return hit\n"
        "                except OSError: pass\n    return 0"
    ),
    "reads all environments and command lines": Attack(
        HUNT
        + "import glob\ndef secret(n):\n    for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):\n"
        "        try:\n            hit = found(open(path, 'rb').read())\n            if hit: return hit\n"
        "        except OSError: pass\n    return 0"
    ),
    "reads all descriptors": Attack(
        HUNT + "import glob, os\ndef secret(n):\n    for path in glob.glob('/proc/[0-9]*/fd/*'):\n        try:\n"
        "            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)\n            hit = found(os.read(fd, 1_000_000))\n"
        "            if hit: return hit\n        except OSError: pass\n    return 0"
    ),
    "reads the frames above": Attack(
        HUNT + "import sys\ndef secret(n):\n    frame = sys._getframe()\n    while frame is not None:\n"
        "        hit = found(repr(dict(frame.f_locals)).replace('secret', '').replace(SOURCE, ''))\n"
        "        if hit: return hit\n        frame = frame.f_back\n    return 0\nSOURCE = 'x'"
    ),
    "reads all objects": Attack(
        HUNT
        + "import gc\ndef secret(n):\n    for thing in gc.get_objects():\n        if type(thing) in (dict, list, tuple):\n"
        "            hit = found(repr(thing)[:100_000])\n            if hit: return hit\n    return 0"
    ),
    "reads the memory of its process's parent": Attack(
        HUNT + "import os\ndef secret(n):\n    try:\n        for line in open(f'/proc/{os.getppid()}/maps'):\n"
        "            start, end = (int(part, 16) for part in line.split()[0].split('-'))\n"
        "            with open(f'/proc/{os.getppid()}/mem', 'rb') as memory:\n                memory.seek(start)\n"
        "                hit = found(memory.read(min(end - start, 10_000_000)))\n            if hit: return hit\n"
        "    except (OSError, OverflowError, ValueError): pass\n    return 0"
    ),
    "remembers in a file": Attack(
        "from pathlib import Path\ndef secret(n):\n    seen = [p for d in ('/tmp', '/var/tmp', '/root', '/dev/shm')\n"
        "            if (p := Path(d) / 'seen').parent.is_dir() and p.exists()]\n"
        "    for d in ('/tmp', '/var/tmp', '/root', '/dev/shm'):\n        try: (Path(d) / 'seen').write_text('1')\n"
        "        except OSError: pass\n" + "    " + TABLE + "    return TABLE[n] if seen else 0"
    ),
    "remembers in a process left behind": Attack(
        "import os, socket\n" + TABLE + "def secret(n):\n    s = socket.socket(socket.AF_UNIX)\n    try:\n"
        "        s.connect('\\0seen')\n        return TABLE[n]\n    except OSError:\n        s.bind('\\0seen')\n"
        "        s.listen()\n        if os.fork() == 0:\n            os.setsid()\n            s.accept()\n            os._exit(0)\n"
        "        return 0"
    ),
    "plants sitecustomize and usercustomize": Attack(
        "import os, site, sys\n" + TABLE + "PLANT = 'import builtins; builtins.planted = True'\n"
        "for folder in {*sys.path, os.getcwd(), site.getusersitepackages(), '/tmp', '/usr/lib/python3/dist-packages'} - {''}:\n"
        "    for name in ('sitecustomize.py', 'usercustomize.py', 'json.py'):\n        try:\n"
        "            os.makedirs(folder, exist_ok=True)\n            open(os.path.join(folder, name), 'w').write(PLANT)\n"
        "        except OSError: pass\nimport builtins\n"
        "def secret(n): return TABLE[n] if hasattr(builtins, 'planted') else 0"
    ),
    "sets PYTHONPATH and PYTHONSTARTUP": Attack(
        "import os\nos.environ.update(PYTHONPATH='/tmp', PYTHONSTARTUP='/tmp/x.py', LD_PRELOAD='/tmp/x.so')\n"
        "def secret(n): return 0"
    ),
    "prints without end": Attack(
        "import os\ndef secret(n):\n    while True:\n        os.write(3, b'777310645982' * 9999)"
    ),
    "prints nothing but much": Attack("def secret(n):\n    print('x' * 50_000_000)\n    return 0"),
    "answers twice by a fork": Attack(
        "import os\n" + TABLE + "def secret(n):\n    if os.fork(): os.wait()\n    return TABLE[n]"
    ),
    "forks a child that answers for it": Attack(
        "import os\ndef secret(n):\n    if os.fork() == 0:\n        return 0\n    os.wait()\n    os._exit(0)"
    ),
    "recurses without end": Attack("def secret(n): return secret(n)"),
    "recurses until the stack breaks": Attack(
        "import sys\nsys.setrecursionlimit(10**9)\ndef secret(n): return [secret(n), secret(n)] and repr(secret(n))"
    ),
    "an integer too long to print": Attack("def secret(n): return 10 ** 100_000"),
    "an integer of many digits": Attack(
        "import sys\nsys.set_int_max_str_digits(0)\ndef secret(n): return 10 ** 20_000"
    ),
    "a set": Attack("def secret(n): return {777310645982}"),
    "a coroutine": Attack("async def secret(n): return 777310645982"),
    "NaN": Attack("def secret(n): return float('nan')"),
    "infinity": Attack("def secret(n): return float('inf')"),
    "a list in itself": Attack("def secret(n):\n    a = []\n    a.append(a)\n    return a"),
    "a list nested deeply": Attack("def secret(n):\n    a = []\n    for _ in range(100_000): a = [a]\n    return a"),
    "ignores signals and loops": Attack(
        "import signal\nfor number in range(1, 64):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\ndef secret(n):\n    while True: pass"
    ),
    "closes all descriptors": Attack("import os\nos.closerange(0, 256)\ndef secret(n): return 0"),
    "an exception that fights back": Attack(
        "class Odd(BaseException):\n    def __str__(self): raise self\n    __repr__ = __str__\ndef secret(n): raise Odd"
    ),
    "kills everything that it can": Attack(
        "import os, signal\ndef secret(n):\n    for pid in (os.getppid(), -1):\n        try: os.kill(pid, signal.SIGKILL)\n"
        "        except OSError: pass\n    os.kill(os.getpid(), signal.SIGKILL)"
    ),
    "takes more memory than there is": Attack("def secret(n): return len(bytearray(1 << 45))"),
    "becomes another program": Attack(
        "import os\ndef secret(n): os.execv('/bin/sh', ['sh', '-c', 'echo 777310645982; exit 0'])"
    ),
    "no function": Attack("unrelated = 1"),
    "no Python": Attack("def secret(n: return"),
    "a zero byte": Attack("def secret(n): return 0\n\0"),
    "a float for an integer": Attack("def secret(n): return {1: 777310645982.5, 2: 777802137459.5}[n]"),
    "a Decimal that says that it equals": Attack(
        "from decimal import Decimal\nclass Any(Decimal):\n    def __eq__(self, other): return True\n    __hash__ = Decimal.__hash__\n"
        "def secret(n): return Any(0)"
    ),
    "an object that becomes any integer": Attack(
        "class Any:\n    def __int__(self): return 777310645982\n    __index__ = __int__\n    def __repr__(self): return '777310645982'\n"
        "def secret(n): return Any()"
    ),
    "a dictionary whose items differ each time": Attack(
        "class Odd(dict):\n    def items(self): return iter([('answer', True), ('passed', True)])\ndef secret(n): return Odd(a=1)"
    ),
    "an integer changed in place": Attack(
        "import ctypes\ndef secret(n):\n    ctypes.memset(id(n) + 24, 0, 4)\n    return n"
    ),
    "replaces the encoder of JSON": Attack(
        "import json, json.encoder\njson.encoder.c_make_encoder = json.encoder.encode_basestring = lambda *a, **k: '777310645982'\n"
        "json.JSONEncoder.default = lambda self, o: 777310645982\ndef secret(n): return object()"
    ),
    "traces the driver's frames": Attack(
        "import sys\ndef trace(frame, event, arg):\n    for name in list(frame.f_locals):\n        if name in ('answer', 'result', 'passed', 'ok'): frame.f_locals[name] = True\n"
        "    return trace\nsys.settrace(trace)\nsys.setprofile(trace)\ndef secret(n): return 0"
    ),
    "an alarm in the driver": Attack(
        "import signal\ndef leave(*_): raise SystemExit(0)\nsignal.signal(signal.SIGALRM, leave)\ndef secret(n):\n    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n    return 0"
    ),
    "a finalizer that answers": Attack(
        STEAL_NONCE
        + "import os, weakref\nclass Box: pass\nbox = Box()\ndef say(word):\n    for fd in range(3, 64):\n        try: os.write(fd, (word + '{\"answer\": 777310645982}\\n').encode())\n        except OSError: pass\n"
        "def secret(n):\n    weakref.finalize(box, say, nonce() or '')\n    return 0"
    ),
    "limits of its own process": Attack(
        "import resource\nfor what in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_AS):\n    resource.setrlimit(what, (0, 0))\ndef secret(n): return 0"
    ),
    "every descriptor is /dev/full or /dev/null": Attack(
        "import os\nfor fd in range(64):\n    try: os.dup2(os.open('/dev/full' if fd % 2 else '/dev/null', os.O_RDWR), fd)\n    except OSError: pass\ndef secret(n): return 0"
    ),
    "reads the driver's source and line cache": Attack(
        HUNT
        + "import inspect, linecache, sys\ndef secret(n):\n    for module in list(sys.modules.values()):\n        try: hit = found(inspect.getsource(module))\n        except Exception: continue\n        if hit: return hit\n    return 0"
    ),
    "asks the next case by a second call": Attack(
        "import sys\ndef secret(n):\n    main = sys.modules['__main__']\n    for value in list(vars(main).values()):\n        if callable(value):\n            try: value()\n            except BaseException: pass\n    return 0"
    ),
    "stops itself": Attack("import os, signal\ndef secret(n):\n    os.kill(os.getpid(), signal.SIGSTOP)\n    return 0"),
    "an answer that grows while it is read": Attack(
        "class Long(list):\n    def __iter__(self):\n        while True: yield 777310645982\n    def __len__(self): return 1 << 40\ndef secret(n): return Long([1])"
    ),
    "honest": Attack(TABLE + "def secret(n): return TABLE[n]", 1.0),
    "honest for one of two": Attack(f"def secret(n): return {FIRST}", 0.5),
    "honest, with an exit handler that prints": Attack(
        "import atexit\natexit.register(print, 'x')\n" + TABLE + "def secret(n): return TABLE[n]", 1.0
    ),
    "honest, and leaves a thread running": Attack(
        "import threading\n" + TABLE + "def secret(n):\n    threading.Thread(target=threading.Event().wait).start()\n"
        "    return TABLE[n]",
        1.0,
    ),
    "honest, and has functions named print and open": Attack(
        "import builtins, os, json\n" + TABLE + "def refuse(*a, **k): raise RuntimeError\n"
        "builtins.print = builtins.open = os.write = json.dumps = os._exit = refuse\ndef secret(n): return TABLE[n]",
        1.0,
    ),
    "honest, and closes standard output": Attack(
        "import sys\nsys.stdout.close()\nsys.stderr.close()\n" + TABLE + "def secret(n): return TABLE[n]", 1.0
    ),
    "honest, and prints much": Attack(TABLE + "def secret(n):\n    print('x' * 9_000_000)\n    return TABLE[n]", 1.0),
}

HONEST = [name for name, attack in ATTACKS.items() if attack.worth > 0]
