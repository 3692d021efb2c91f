"""Models by their names on the hub: found in the cache, got when asked, else refused."""

import base64
import http.server
import json
import threading

import huggingface_hub
import pytest

from bacr_jax.errors import UserError
from bacr_jax.model.hf.hub import check_push, is_hub_name, local_folder, push

NAME = "Qwen/Qwen2.5-1.5B-Instruct"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (NAME, True),
        (f"{NAME}@main", True),
        ("models/Qwen", True),  # nothing tells it from a name until the folder is there
        ("models", False),
        ("/models/Qwen", False),
        ("./models/Qwen", False),
        ("../models", False),
        ("a/b/c", False),
        ("~/models", False),
    ],
)
def test_names_of_the_hub(path, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name(path) == name
    if name:
        (tmp_path / path).mkdir(parents=True)
        assert not is_hub_name(path)
        assert local_folder(path, download=False, where="model.path") == path


def test_a_cached_model_is_its_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = []

    def snapshot(name, **options):
        asked.append((name, options))
        return tmp_path / "snapshots" / "abc"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    found = local_folder(f"{NAME}@v1", download=True, where="model.path")
    assert found == str(tmp_path / "snapshots" / "abc")
    ((name, options),) = asked
    assert (name, options["revision"], options["local_files_only"]) == (NAME, "v1", False)
    # The model card contains the license.
    assert {"*.safetensors", "README.md"} < set(options["allow_patterns"])


def test_what_is_not_there_is_refused_with_the_command_that_gets_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        UserError, match=f"pass --download to download it, or run hf download {NAME}"
    ):
        local_folder(NAME, download=False, where="model.path")

    def unreachable(name, **options):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(
        UserError, match=r"'Qwen.*' can't be downloaded from the hub \(no route\); check"
    ):
        local_folder(NAME, download=True, where="model.path")


@pytest.mark.parametrize("download", [False, True])
def test_a_folder_of_a_shipped_config_is_named_as_the_hub_has_it(monkeypatch, tmp_path, download):
    monkeypatch.chdir(tmp_path)
    line = "run hf download Qwen/Qwen2.5-7B --local-dir models/Qwen2.5-7B, or use Qwen/Qwen2.5-7B"
    with pytest.raises(UserError, match=line):
        local_folder("models/Qwen2.5-7B", download=download, where="model.path")
    with pytest.raises(
        UserError, match="the folder 'models/mine' does not exist; create it with bacr import"
    ):
        local_folder("models/mine", download=download, where="model.path")


def test_a_folder_without_weights_is_no_cached_model(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: tmp_path)
    shape = local_folder(NAME, download=False, where="model.path", weights=False)
    assert shape == str(tmp_path)
    with pytest.raises(UserError, match="pass --download to download it"):
        local_folder(NAME, download=False, where="model.path")
    (tmp_path / "model.safetensors").touch()
    assert local_folder(NAME, download=False, where="model.path") == str(tmp_path)


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the hub: what it was sent, by path of the request; 403 for what is closed."""
    sent = {}

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            sent[self.path] = [json.loads(line) for line in body.splitlines()]
            told, status = {"url": f"{address}/me/new"}, 200
            if "closed" in self.path or b"closed" in body:
                told, status = {"error": "no right to write"}, 403
            elif "preupload" in self.path:
                files = sent[self.path][0]["files"]
                modes = {"uploadMode": "regular", "shouldIgnore": False}
                told = {"files": [{"path": file["path"], **modes} for file in files]}
            elif "commit" in self.path:
                told = {"commitUrl": f"{address}/me/new/commit/1", "commitOid": "1"}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield sent
    server.shutdown()


def test_a_folder_is_pushed_to_a_private_repository(hub, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "budget.txt").write_text("phi")
    assert push(tmp_path, "me/new").endswith("/me/new")
    (made,) = hub["/api/repos/create"]
    assert made["name"] == "new" and made["organization"] == "me" and "private" in json.dumps(made)
    commit = hub["/api/models/me/new/commit/main"]
    files = {one["value"]["path"]: one["value"] for one in commit if one["key"] == "file"}
    assert {*files} == {"config.json", "sub/budget.txt"}
    assert base64.b64decode(files["sub/budget.txt"]["content"]) == b"phi"


def test_what_can_not_be_pushed_is_said_in_one_line(hub, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"--push me/closed: the upload of .* failed .*is compl"):
        push(tmp_path, "me/closed")
    for name in ("new", "me/new@main", "a/b/c"):
        with pytest.raises(
            UserError, match="is not the name of a repository on the hub; use OWNER/NAME"
        ):
            check_push(name)
