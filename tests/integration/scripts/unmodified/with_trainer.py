"""Training with the Trainer of Hugging Face Transformers: a small GPT-2, made from its configuration."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 128, "n_positions": 32, "vocab_size": 512}


def main() -> None:
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SHAPE, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False))
    data = [{"input_ids": row, "labels": row} for row in torch.randint(512, (256, 32))]
    arguments = TrainingArguments(
        output_dir="unused", num_train_epochs=1, per_device_train_batch_size=8, use_cpu=True, save_strategy="no",
        report_to="none", disable_tqdm=True, ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)  # prints how long the training took
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"trained {result.global_step} steps, mean loss {result.training_loss:.6f}")
        torch.save(model.state_dict(), sys.argv[1])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
