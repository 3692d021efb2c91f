"""Defines beginnings of command lines for tables of inputs, and contents of the files they name.

`{}` in a command line stands for the folder of these files.
"""

# A config that trains within seconds, so that a test fails quickly if an invalid input is accepted.
SMALL = """\
model: {compute_dtype: float32, hidden_size: 16, intermediate_size: 32, num_layers: 1}
budget: {min: 4, max: 8}
curriculum: {mu0: 6, sigma: 2}
rollout: {questions: 4, group_size: 2, answer_tokens: 2, chunk: 4, windows: 1, refill: 1.0}
train: {steps: 1, minibatches: 1}
eval: {budgets: [4, 8], size: 4, samples: 0}
"""
QUESTIONS = "".join(f'{{"question": "{i} + {i}", "answer": "{2 * i}"}}\n' for i in range(1, 9))
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"

TRAIN = "train --config {}/small.yaml output.dir={}/run "
WORDS = (
    TRAIN + "data.num_groups=1 model.path={}/model "
    "data.train=jsonl:{}/questions.jsonl data.eval=[jsonl:{}/questions.jsonl] "
)
EVALUATE = "evaluate --model {}/model --data jsonl:{}/questions.jsonl --budgets 4 --out {}/out "
GENERATE = "generate --model {}/model --budget 4 "
PLAN = "plan --config {}/small.yaml --compile none "
GRADE = "grade --cases {}/cases.jsonl "
EXPORT = "export --run {}/run --out {}/out "
REPORT = "report --run {}/run "
