"""A small GPT-2, trained by a Trainer that saves and resumes through pyckpt.

    python examples/integrations/transformers_trainer.py RUN

Run it, kill it, and run it again: it goes on after the newest checkpoint that is complete.
With torchrun it runs on several processes.
"""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from pyckpt.integrations.transformers import Trainer


class Letters(torch.utils.data.Dataset):
    """Sequences of letters, of which each follows the one before it."""

    def __len__(self):
        return 256

    def __getitem__(self, i):
        letters = (torch.arange(16) + i) % 26
        return {"input_ids": letters, "labels": letters}


directory = Path(sys.argv[1])
config = GPT2Config(
    vocab_size=26, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=25
)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        output_dir=directory,
        num_train_epochs=2,
        logging_steps=10,
        save_steps=10,
        save_total_limit=2,
        report_to=[],
    ),
    train_dataset=Letters(),
    checkpointer={"on_signals": ("SIGTERM",)},  # save and stop
)
trainer.train(resume_from_checkpoint=any(directory.glob("step-*/.metadata")))
trainer.save_model()  # for from_pretrained, as ever
