"""A fine-tuning recipe: checkpoints on the way, at its end a model that transformers loads.

    python examples/integrations/recipe.py RUN [STEPS]

Run it, kill it, and run it again. At the end, RUN/model is for ``from_pretrained``.
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pyckpt

run, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)

# These lines are all that has to do with checkpoints.
with pyckpt.Checkpointer(run / "checkpoints", every_steps=5, keep_last=2) as checkpointer:
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "rng": pyckpt.RngState(),
    }
    for step in range((checkpointer.restore(state) or 0) + 1, steps + 1):
        tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(f"step {step} loss {loss.item():.6f}", flush=True)
        checkpointer.step(step, state)
    checkpointer.save(steps, state, final=True)
    checkpointer.export(run / "model", config=config)
print(f"wrote {run / 'model'}")
