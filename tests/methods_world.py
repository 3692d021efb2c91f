"""A run small enough for a test, with its warm-up, for methods to start from."""

SMALL = """
model: {compute_dtype: float32, hidden_size: 16, intermediate_size: 32, num_layers: 1,
        scan_layers: false, remat: false}
data: {ledger: {train_size: 64}}
budget: {min: 4, max: 12}
curriculum: {mu0: 8, sigma: 4, update_every: 2}
rollout: {questions: 4, group_size: 4, answer_tokens: 2, chunk: 6}
value: {hidden_size: 8, inner_steps: 2}
optimizer: {learning_rate: 1.0e-3}
train: {steps: 4, minibatches: 1}
selfbudgeter: {cold_start_steps: 2, cold_start_tokens: 256}
eval: {budgets: [12], size: 4, samples: 0}
output: {tensorboard: false}
"""
