"""The JobSet: its numbers agree, and its processes understand what they are told."""

import re
from pathlib import Path

import pytest
import yaml

from bacr_jax.parallel import processes

LAUNCH = Path(__file__).parents[2] / "launch"


@pytest.fixture(scope="module")
def jobset():
    return yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())


@pytest.fixture(scope="module")
def job(jobset):
    (only,) = jobset["spec"]["replicatedJobs"]
    assert (only["name"], only["replicas"]) == ("workers", 1)
    return only["template"]["spec"]


@pytest.fixture(scope="module")
def container(job):
    (only,) = job["template"]["spec"]["containers"]
    return only


def test_nodes_are_the_same_number_everywhere(job, container):
    environment = {variable["name"]: variable for variable in container["env"]}
    assert job["parallelism"] == job["completions"]
    assert environment["JAX_NUM_PROCESSES"]["value"] == str(job["completions"])
    assert job["completionMode"] == "Indexed"
    assert f"mesh.data={job['completions']}" in container["args"]


def test_processes_find_each_other(jobset, container):
    environment = {variable["name"]: variable for variable in container["env"]}
    name = jobset["metadata"]["name"]
    address = environment["JAX_COORDINATOR_ADDRESS"]["value"]
    host, port = address.split(":")
    # The name that JobSet gives pod 0 of its first job, in the service called after itself.
    assert host == f"{name}-workers-0-0.{name}"
    assert {"containerPort": int(port)} in container["ports"]
    assert jobset["spec"]["network"]["enableDNSHostnames"] is True
    path = environment["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    count = environment["JAX_NUM_PROCESSES"]["value"]
    told = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": count, "JAX_PROCESS_ID": "1"}
    joined = processes.settings(told)
    assert (joined["num_processes"], joined["process_id"]) == (int(count), 1)


def test_bad_input_is_final_and_everything_else_goes_on(jobset, job, container):
    assert job["backoffLimit"] == 0 and job["template"]["spec"]["restartPolicy"] == "Never"
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [2],
    }
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0
    assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] >= 60


@pytest.mark.parametrize("file", ["kubernetes.yaml", "kubernetes_with_vllm.yaml"])
def test_names_of_rules_are_ones_that_jobset_takes(file):
    rules = yaml.safe_load((LAUNCH / file).read_text())["spec"]["failurePolicy"]["rules"]
    # JobSet's webhook (pkg/webhooks/jobset_webhook.go) refuses others; no hyphens.
    pattern = r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"
    assert rules and all(re.fullmatch(pattern, rule["name"]) for rule in rules)


def test_volumes_are_mounted_where_the_run_looks(job, container):
    volumes = {volume["name"] for volume in job["template"]["spec"]["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == volumes and "/dev/shm" in mounts.values()
    named = [word for word in container["args"] if "=/" in word]
    assert named and all("=/data/" in word for word in named)
    assert jobset_files_exist(container)


def jobset_files_exist(container):
    words = [*container["command"], *container["args"]]
    files = [word for word in words if re.match(r"(launch|configs)/", word)]
    return len(files) == 2 and all((LAUNCH.parent / file).is_file() for file in files)


def test_its_job_is_one_that_kubernetes_knows(jobset, job):
    reason = "needs Kubernetes' schemas: pip install kubernetes-validate (100 MB)"
    validate = pytest.importorskip("kubernetes_validate", reason=reason)
    validate.validate(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "bacr"}, "spec": job},
        "1.31",
        strict=True,
    )


def test_the_container_file_installs_what_the_project_declares():
    import tomllib

    project = tomllib.loads((LAUNCH.parent / "pyproject.toml").read_text())["project"]
    text = (LAUNCH / "Dockerfile").read_text()
    (default,) = re.findall(r"^ARG CUDA=(\w+)$", text, flags=re.MULTILINE)
    assert {default, "hub"} <= set(project["optional-dependencies"])
    (version,) = re.findall(r"^FROM python:(\d\.\d+)-slim$", text, flags=re.MULTILINE)
    least = project["requires-python"].removeprefix(">=")
    assert tuple(map(int, version.split("."))) >= tuple(map(int, least.split(".")))
