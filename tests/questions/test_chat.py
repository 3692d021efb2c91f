"""Questions in chat form are taken if they hold one turn of a user."""

import json

import pytest

from bacr_jax.config import DataConfig
from bacr_jax.errors import UserError
from bacr_jax.questions.chat import NO_SINGLE_TURN, ChatQuestion, is_chat, single_turn
from bacr_jax.questions.loaders import load_questions


def message(role, content):
    return {"role": role, "content": content}


USER = message("user", "1+1?")
SYSTEM = message("system", "Be brief.")


def test_a_user_turn_with_or_without_a_system_message_is_a_question():
    assert single_turn([USER]) == ChatQuestion("1+1?", "")
    assert single_turn([SYSTEM, USER]) == ChatQuestion("1+1?", "Be brief.")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [SYSTEM],
        [USER, message("assistant", "2"), message("user", "sure?")],
        [message("assistant", "2")],
        [message("user", [{"type": "image"}])],
        [SYSTEM, SYSTEM, USER],
        [message("system", None), USER],
    ],
)
def test_other_messages_are_no_question(messages):
    assert single_turn(messages) is None


def test_only_lists_of_messages_are_chat():
    assert is_chat([USER]) and not is_chat("1+1?") and not is_chat(["1+1?"])
    assert not is_chat([{"content": "x"}])


def questions_of(path, prompts, **settings):
    rows = [json.dumps({"prompt": prompt, "ground_truth": "2"}) for prompt in prompts]
    path.write_text("\n".join(rows))
    config = DataConfig(dir=str(path.parent), num_groups=1, **settings)
    return load_questions(f"jsonl:{path.name}", config, 0, "train")


def test_rows_of_several_turns_are_left_out_with_their_reason(tmp_path):
    turns = [USER, message("assistant", "2"), message("user", "sure?")]
    found = questions_of(tmp_path / "chat.jsonl", [[USER], turns])
    assert found.questions == ["1+1?"] and found.answers == ["2"]
    assert [(row.id, row.reason) for row in found.left_out] == [("jsonl-train-1", NO_SINGLE_TURN)]
    with pytest.raises(UserError, match=rf"none of the 1 rows .*\(1 with {NO_SINGLE_TURN}; "):
        questions_of(tmp_path / "chat.jsonl", [turns])


def test_a_system_message_has_to_be_written_into_the_config(tmp_path):
    path = tmp_path / "chat.jsonl"
    with pytest.raises(
        UserError, match="have the system message 'Be brief.'; set data.system_prompt to this text,"
    ):
        questions_of(path, [[SYSTEM, USER], [USER]])
    two = [[SYSTEM, USER], [message("system", "Think."), USER]]
    with pytest.raises(
        UserError, match="have 2 different system messages, but a run uses a single"
    ):
        questions_of(path, two)
    for text in ("", "Be brief."):
        assert len(questions_of(path, two, system_prompt=text)) == 2
