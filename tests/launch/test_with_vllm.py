"""A learner beside servers of vLLM: who gets which GPUs, who finds whom, and how all of it ends."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from bacr_client import Server
from bacr_jax.config.checks import check
from bacr_jax.config.io import load
from bacr_jax.model.sizes import PRESETS
from bacr_jax.parallel import processes
from bacr_plan.workload import planned_shape

LAUNCH = Path(__file__).parents[2] / "launch"


def run(script, *arguments, **variables):
    kept = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(
        ["bash", LAUNCH / script, *arguments],
        env=kept,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def urls_of(words):
    (found,) = [word for word in words if word.startswith("rollout.urls=")]
    return found


@pytest.fixture
def stand_ins(tmp_path):
    """Python of the learner and of the servers, which note how they were called.

    The learner writes a policy and stops with a checkpoint once both servers are there; the first
    server that is started dies at once.
    """
    notes = tmp_path / "notes"
    notes.mkdir()
    learner, server = tmp_path / "learner", tmp_path / "server"
    learner.write_text(f"""#!/usr/bin/env bash
echo "$CUDA_VISIBLE_DEVICES $*" > {notes}/learner
folder="$(printf '%s\\n' "$@" | sed -n 's/^rollout.weights_dir=//p')/run/version-0"
mkdir -p "$folder" && touch "$folder/config.json" && echo "$folder" > {notes}/folder
until [ "$(cat {notes}/server-* 2>/dev/null | wc -l)" -ge 3 ]; do sleep 0.1; done
exit 75
""")
    server.write_text(f"""#!/usr/bin/env bash
trap 'touch {notes}/ended-$CUDA_VISIBLE_DEVICES; exit 0' TERM
echo "$VLLM_SERVER_DEV_MODE $*" >> {notes}/server-$CUDA_VISIBLE_DEVICES
mkdir {notes}/died 2>/dev/null && exit 1
while :; do sleep 0.1; done
""")
    for file in (learner, server):
        file.chmod(0o755)
    return notes, str(learner), str(server)


@pytest.mark.slow  # waits for processes
def test_one_machine_is_split_and_ends_as_its_training_does(stand_ins):
    notes, learner, server = stand_ins
    done = run(
        "with_vllm.sh", "--learner", "2", "--samplers", "2", "--gpu", "a100", "--python", server,
        "--config", "quickstart", "rollout.async_steps=1", PYTHON=learner,
    )  # fmt: skip
    assert done.returncode == 75, done.stderr
    said = (notes / "learner").read_text()
    assert said.startswith(
        "0,1 -m bacr_jax.train --config quickstart rollout.async_steps=1 rollout.eng"
    )
    assert "rollout.urls=[http://127.0.0.1:8000, http://127.0.0.1:8001]" in said
    folder = (notes / "folder").read_text().strip()
    calls = [(notes / f"server-{gpu}").read_text().splitlines() for gpu in (2, 3)]
    # The one that died was started again.
    assert sorted(map(len, calls)) == [1, 2]
    for port, lines in zip((8000, 8001), calls):
        for line in lines:
            assert line.startswith(f"1 -m vllm.entrypoints.openai.api_server --model {folder} ")
            assert f"--port {port} " in line and "--logprobs-mode processed_logprobs" in line
    assert (notes / "ended-2").exists() and (notes / "ended-3").exists()
    # The memory that held policies is free again.
    assert not Path(folder).parents[1].exists()


def test_one_machine_shows_what_it_would_run():
    done = run(
        "with_vllm.sh", "--dry-run", "--learner", "6", "--samplers", "2", "--gpu", "hopper",
        "--config", "qwen2.5-1.5b-math", "rollout.async_steps=1",
    )  # fmt: skip
    first, second, *exports, command = done.stdout.splitlines()
    assert first.startswith("CUDA_VISIBLE_DEVICES=6 ") and second.startswith("CUDA_VISIBLE_DEV")
    assert "export CUDA_VISIBLE_DEVICES=0\\,1\\,2\\,3\\,4\\,5" in exports
    # A config that the command would take.
    words = shlex.split(command)
    assert words[1:3] == ["-m", "bacr_jax.train"]
    check(load([words[4]], words[5:]))


def test_one_machine_keeps_to_the_gpus_that_it_may_use():
    split = ("with_vllm.sh", "--dry-run", "--learner", "2", "--samplers", "1", "--gpu", "hopper")
    done = run(*split, "--config", "quickstart", CUDA_VISIBLE_DEVICES="3,5,6")
    assert done.stdout.startswith("CUDA_VISIBLE_DEVICES=6 ")
    assert "export CUDA_VISIBLE_DEVICES=3\\,5\n" in done.stdout
    fewer = run(*split, "--config", "quickstart", CUDA_VISIBLE_DEVICES="3,5")
    assert (fewer.returncode, fewer.stdout) == (2, "") and "found 3,5; use 3" in fewer.stderr


def started_server(words):
    """Returns the words of the vLLM command that a call of sampler.sh runs."""
    (line,) = run("sampler.sh", "--dry-run", *words).stdout.splitlines()
    return shlex.split(line)


def host_of(command):
    """Returns the address of the last --host, which vLLM uses."""
    last = max(index for index, word in enumerate(command) if word == "--host")
    return command[last + 1]


@pytest.fixture
def policy(tmp_path):
    """Returns a folder that contains the first policy of a run, as sampler.sh needs it."""
    (tmp_path / "w/version-0").mkdir(parents=True)
    (tmp_path / "w/version-0/config.json").touch()
    return str(tmp_path / "w")


@pytest.mark.parametrize(
    ("options", "address"), [((), "127.0.0.1"), (("--host", "10.0.0.5"), "10.0.0.5")]
)
def test_servers_listen_only_where_the_learner_of_their_machine_reaches_them(
    policy, options, address
):
    shown = run(
        "with_vllm.sh", "--dry-run", "--learner", "2", "--samplers", "2", "--gpu", "hopper",
        *options, "--config", "quickstart",
    )  # fmt: skip
    assert (shown.returncode, shown.stderr) == (0, "")
    *lines, learner = shown.stdout.splitlines()
    servers = [shlex.split(line)[2:] for line in lines if "/sampler.sh " in line]
    assert len(servers) == 2
    for words in servers:
        words[words.index("--weights") + 1] = policy
        assert host_of(started_server(words)) == address
    urls = ", ".join(f"http://{address}:{port}" for port in (8000, 8001))
    assert urls_of(shlex.split(learner)) == f"rollout.urls=[{urls}]"


def test_a_server_is_reachable_from_other_machines_only_if_its_command_contains_so(policy):
    assert host_of(started_server(["--weights", policy])) == "127.0.0.1"
    assert host_of(started_server(["--weights", policy, "--host", "0.0.0.0"])) == "0.0.0.0"
    shown = run(
        "slurm_with_vllm.sh", "--dry-run", "--weights", policy, "--gpu", "hopper",
        "--config", "qwen2.5-7b-math", BACR_NODES="n1 n2", SLURM_GPUS_ON_NODE="1",
    )  # fmt: skip
    words = shlex.split(shown.stdout.splitlines()[0])
    (script,) = [index for index, word in enumerate(words) if word.endswith("/sampler.sh")]
    node = run("sampler.sh", "--dry-run", *words[script + 1 :]).stdout
    assert host_of(started_server(shlex.split(node)[3:])) == "0.0.0.0"


def test_documented_servers_that_load_weights_listen_on_this_machine_only():
    """Every route that loads weights is open without a key (VLLM_SERVER_DEV_MODE)."""
    commands = []
    for page in sorted((LAUNCH.parent / "docs").glob("*.md")):
        lines = page.read_text().replace("\\\n", " ").splitlines()
        commands += [line for line in lines if line.startswith("VLLM_SERVER_DEV_MODE=1 ")]
    assert commands
    for command in commands:
        assert host_of(shlex.split(command)) == "127.0.0.1"


@pytest.mark.parametrize("script", ["with_vllm.sh", "slurm_with_vllm.sh", "sampler.sh"])
def test_what_is_missing_is_one_line(script):
    done = run(script, "--gpu", "a100", "--config", "c.yaml")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "; pass --" in done.stderr or "; use " in done.stderr


def test_slurm_gives_the_first_node_to_the_learner():
    done = run(
        "slurm_with_vllm.sh", "--dry-run", "--weights", "/data/w", "--gpu", "hopper", "--config",
        "qwen2.5-7b-math", "rollout.async_steps=1", BACR_NODES="n1 n2 n3",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    servers, *_, learner = map(shlex.split, done.stdout.splitlines())
    at = lambda words: words[words.index("--nodelist") + 1]
    assert (at(servers), at(learner)) == ("n2,n3", "n1")
    assert servers[servers.index("--weights") + 1] == "/data/w"
    urls = [f"http://{node}:{8000 + gpu}" for node in ("n2", "n3") for gpu in range(8)]
    assert urls_of(learner) == f"rollout.urls=[{', '.join(urls)}]"
    start = learner.index("--config")
    check(load([learner[start + 1]], learner[start + 2 :]))


@pytest.mark.parametrize("gpus", ["1", "4"])
def test_a_node_of_slurm_has_a_server_per_gpu_at_the_address_that_the_learner_uses(tmp_path, gpus):
    (tmp_path / "version-0").mkdir()
    (tmp_path / "version-0/config.json").touch()
    done = run(
        "slurm_with_vllm.sh", "--dry-run", "--weights", str(tmp_path), "--gpu", "hopper",
        "--config", "qwen2.5-7b-math", BACR_NODES="n1 n2", SLURM_GPUS_ON_NODE=gpus,
    )  # fmt: skip
    servers, *_, learner = map(shlex.split, done.stdout.splitlines())
    (script,) = [index for index, word in enumerate(servers) if word.endswith("/sampler.sh")]
    shown = run("sampler.sh", "--dry-run", *servers[script + 1 :])
    ports = []
    for gpu, line in enumerate(shown.stdout.splitlines()):
        visible, shell, name, *words = shlex.split(line)
        assert (visible, shell) == (f"CUDA_VISIBLE_DEVICES={gpu}", "bash")
        assert name.endswith("/sampler.sh")
        (server,) = run("sampler.sh", "--dry-run", *words).stdout.splitlines()
        command = shlex.split(server)
        assert "--tensor-parallel-size" not in command
        ports.append(command[command.index("--port") + 1])
    listed = ", ".join(f"http://n2:{port}" for port in ports)
    assert urls_of(learner) == f"rollout.urls=[{listed}]" and len(ports) == int(gpus)


def test_a_node_whose_servers_all_fail_fails_also_if_started_by_a_bare_name(tmp_path):
    """Each server of the copied scripts exits with 7."""
    script = tmp_path / "sampler.sh"
    text = (LAUNCH / "sampler.sh").read_text()
    # Each server of the node ends with code 7 instead of serving.
    script.write_text(text.replace('server=""\n', 'exit 7\nserver=""\n', 1))
    (tmp_path / "environment.sh").write_text((LAUNCH / "environment.sh").read_text())
    node = subprocess.run(
        ["bash", "sampler.sh", "--weights", "w", "--gpus", "2"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "0,1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (node.returncode, node.stderr) == (7, "")


def test_the_servers_of_a_node_keep_to_its_gpus_and_end_together(stand_ins, tmp_path):
    notes, _, server = stand_ins
    (tmp_path / "w/version-0").mkdir(parents=True)
    (tmp_path / "w/version-0/config.json").touch()
    command = [LAUNCH / "sampler.sh", "--weights", tmp_path / "w", "--python", server]
    node = subprocess.Popen(
        ["bash", *command, "--gpus", "2", "--port", "9000"],
        env={"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "3,5,6"},
    )
    called = [notes / "server-3", notes / "server-5"]
    deadline = time.monotonic() + 60
    # The first server that is started dies, and is started again.
    while sum(file.read_text().count("\n") for file in called if file.exists()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    # Slurm sends this signal for the learner.
    node.send_signal(signal.SIGUSR1)
    for file, port in zip(called, ("9000", "9001")):
        assert all(f"--port {port} " in line for line in file.read_text().splitlines())
    node.terminate()
    assert node.wait(timeout=60) == 143
    assert (notes / "ended-3").exists() and (notes / "ended-5").exists()
    few = run("sampler.sh", "--weights", "w", "--gpus", "4", CUDA_VISIBLE_DEVICES="3,5,6")
    assert (few.returncode, few.stdout) == (2, "") and "found 3,5,6; use 4 GPUs" in few.stderr


# Shipped configs for machines with several GPUs, which the multi-node launchers are for.
LARGE = sorted(path.stem for path in (LAUNCH.parent / "configs").glob("*-math.yaml"))


def split_of(words):
    """The number of GPUs over which a server splits the model."""
    if "--tensor-parallel-size" not in words:
        return 1
    return int(words[words.index("--tensor-parallel-size") + 1])


def heads_of(config):
    """The number of attention heads of a shipped config's model."""
    return planned_shape(config.data, config.model)[0].num_heads


@pytest.mark.parametrize("name", LARGE)
def test_vllm_can_split_the_heads_of_every_shipped_size(name):
    """It refuses a number of GPUs that does not divide them (vllm issue 11797)."""
    jobset = yaml.safe_load((LAUNCH / "kubernetes_with_vllm.yaml").read_text())
    samplers = jobset["spec"]["replicatedJobs"][1]["template"]["spec"]
    (serve,) = samplers["template"]["spec"]["containers"]
    node = run(
        "slurm_with_vllm.sh", "--dry-run", "--weights", "w", "--gpu", "hopper", "--config", name,
        BACR_NODES="n1 n2",
    )  # fmt: skip
    machine = run(
        *("with_vllm.sh", "--dry-run", "--learner", "4", "--samplers", "4", "--gpu", "hopper"),
        *("--config", name),
    )
    heads = heads_of(load([name]))
    for words in (serve["args"], shlex.split(node.stdout), shlex.split(machine.stdout)):
        assert heads % split_of(words) == 0


def test_the_rule_of_vllm_lists_the_heads_of_the_shipped_sizes():
    text = (LAUNCH / "kubernetes_with_vllm.yaml").read_text()
    rule = " ".join(text.partition("model's attention heads: ")[2].splitlines()[0].split())
    for size, heads in (("0.5b", 14), ("1.5b", 12), ("7b", 28), ("14b", 40), ("32b", 40)):
        assert PRESETS[f"qwen2.5-{size}"].num_heads == heads
    assert rule == "14 in Qwen2.5-0.5B, 12 in 1.5B, 28 in 7B, 40 in 14B and 32B."


def test_pods_of_kubernetes_find_each_other():
    jobset = yaml.safe_load((LAUNCH / "kubernetes_with_vllm.yaml").read_text())
    name, jobs = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    learner, samplers = (job["template"]["spec"] for job in jobs)
    assert [job["name"] for job in jobs] == ["learner", "samplers"]
    # It has succeeded when the learner has.
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["learner"]
    assert samplers["parallelism"] == samplers["completions"]
    (train,), (serve,) = (job["template"]["spec"]["containers"] for job in (learner, samplers))
    hosts = [f"{name}-samplers-0-{i}.{name}:8000" for i in range(samplers["completions"])]
    listed = ", ".join(f"http://{host}" for host in hosts)
    assert urls_of(train["args"]) == f"rollout.urls=[{listed}]"
    for host in hosts:
        Server(f"http://{host}")
    assert {"containerPort": 8000} in serve["ports"]
    # The learner's pod has a number, and yet is alone.
    told = {variable["name"]: variable["value"] for variable in train["env"]}
    assert processes.settings({**told, "JOB_COMPLETION_INDEX": "0"}) is None
    # What one writes, the others read.
    folder = serve["command"][serve["command"].index("--weights") + 1]
    assert f"rollout.weights_dir={folder}" in train["args"]
    for container in (train, serve):
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert any(folder.startswith(f"{mount}/") for mount in mounts)
        assert (LAUNCH.parent / container["command"][1]).is_file()
    gpus = serve["resources"]["limits"]["nvidia.com/gpu"]
    assert serve["args"][-2:] == ["--tensor-parallel-size", str(gpus)]
    check(load(["qwen2.5-7b-math"], train["args"][2:]))
