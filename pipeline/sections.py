"""The sections of a run's configuration and what each key means.

Every field's description is the config reference. A validator's message names the remedy; `config`
puts the key before it.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pipeline.languages import check_language

Method = Literal[
    "plain",
    "prompt_lookup",
    "draft_model",
    "early_exit",
    "mtp",
    "mtp_drafter",
    "universal",
    "auto",
]
_PROBABILISTIC = ("draft_model", "early_exit", "mtp", "mtp_drafter")


class Section(BaseModel):
    """Base of all sections: immutable, and a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PromptConfig(Section):
    template: str | None = Field(
        None,
        description="Text of the user turn, with input columns as `{column}`; `{text}` is the "
        "document. Unset: the task's own template.",
    )
    system: str | None = Field(None, description="System turn of chat models; unset: none.")
    style: Literal["auto", "chat", "plain"] = Field(
        "auto",
        description="`chat` goes through the tokenizer's chat template, `plain` does not; `auto` "
        "is chat where the tokenizer has a template.",
    )
    few_shot: list[dict[str, str]] = Field(
        [],
        description="Worked examples before the row: the template's columns and `output` for each.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Extra arguments of the chat template, such as `enable_thinking: false`."
    )
    source_lang: str | None = Field(
        None, description="Language of the documents, as a BCP 47 code such as `en` or `pt-BR`."
    )
    target_lang: str | list[str] | None = Field(
        None,
        description="Language to translate to; of a list each gets a column of its own, "
        "`translation_<code>`.",
    )
    source_lang_column: str | None = Field(
        None, description="Column with each row's source language, in place of `source_lang`."
    )
    target_lang_column: str | None = Field(
        None, description="Column with each row's target language, in place of `target_lang`."
    )
    split_at: Literal["length", "paragraph", "sentence"] = Field(
        "length",
        description="Pieces of a document under `on_too_long: split`: as few as fit, or each "
        "paragraph (a line break ends one), or each sentence.",
    )

    @property
    def target_langs(self) -> list[str]:
        """The languages given for the whole run."""
        given = self.target_lang
        return [given] if isinstance(given, str) else list(dict.fromkeys(given or []))

    @field_validator("source_lang", "target_lang", mode="before")
    @classmethod
    def _norwegian(cls, value: Any) -> Any:
        """YAML reads a bare `no` as false."""
        if isinstance(value, list):
            return ["no" if code is False else code for code in value]
        return "no" if value is False else value

    @field_validator("source_lang", "target_lang")
    @classmethod
    def _languages_exist(cls, value: str | list[str] | None) -> str | list[str] | None:
        for code in [value] if isinstance(value, str) else value or []:
            check_language(code)
        return value

    @field_validator("few_shot")
    @classmethod
    def _examples_have_output(cls, examples: list[dict[str, str]]) -> list[dict[str, str]]:
        for i, example in enumerate(examples):
            if "output" not in example:
                raise ValueError(f"example {i} has no `output`; add it")
        return examples


class InputConfig(Section):
    path: str = Field(
        description="File, folder (searched recursively) or glob, on disk or as `s3://`; folders "
        "named `key=value` become columns of the output."
    )
    format: Literal["auto", "parquet", "jsonl"] = Field(
        "auto", description="Format of the input files; `auto`: by their names."
    )
    text_column: str = Field("text", description="Column with the document.")
    id_column: str | None = Field(
        None, description="Your row id: carried to the output, never used to resume."
    )
    keep_columns: list[str] | None = Field(
        None, description="Columns copied to the output. Unset: the id column if given, else none."
    )
    reference_column: str | None = Field(
        None,
        description="Column with a right answer, to score the results by: chrF and BLEU of "
        "translations, ROUGE-L of summaries. `{target_lang}` in it stands for the language. Copied "
        "to the output.",
    )
    max_rows: int | None = Field(None, ge=1, description="Take only the first rows of the corpus.")
    unit_rows: Literal["auto"] | int = Field(
        "auto",
        description="Rows per unit of work and commit; `auto`: rows / (32 x actors), 1 to 512.",
    )
    storage_options: dict[str, Any] = Field({}, description="fsspec options of the input store.")

    @field_validator("unit_rows")
    @classmethod
    def _unit_rows_positive(cls, value: str | int) -> str | int:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be `auto` or at least 1")
        return value

    @property
    def kept(self) -> list[str]:
        """Columns copied to the output."""
        if self.keep_columns is not None:
            return list(dict.fromkeys(self.keep_columns))
        return [self.id_column] if self.id_column else []


class OutputConfig(Section):
    path: str = Field(
        description="Folder of the results, on disk or as `s3://`; working files live in its "
        "`_run/`."
    )
    text_column: str | None = Field(
        None, description="Name of the result column. Unset: `summary` or `translation`."
    )
    rows_per_file: int = Field(
        50_000, ge=1, description="Consecutive rows of one input file per output file."
    )
    storage_options: dict[str, Any] = Field({}, description="fsspec options of the output store.")


class ModelConfig(Section):
    target: str = Field(description="Hub id, local folder, GGUF file, or `demo:smollm2`.")
    revision: str | None = Field(None, description="Hub revision of the target.")
    drafter: str | None = Field(
        None,
        description="For `draft_model`: a smaller model with the target's tokenizer; a hub id, "
        "folder, GGUF file or demo, as `model.target`. `auto` uses it too, as what it is.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="`auto`: bfloat16 on CUDA and on CPUs that compute in it, else float32.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="`auto`: cuda where actors get a GPU, else cpu."
    )


class DecodingConfig(Section):
    engine: Literal["auto", "batched", "transformers"] = Field(
        "auto",
        description="`batched`: many rows at a time; `transformers`: row by row through "
        "`model.generate()`; `auto`: batched where the model fits it.",
    )
    method: Method = Field(
        "prompt_lookup",
        description="Where draft tokens come from. `auto` measures what pays, among plain decoding "
        "and all methods that the models allow, at every step and for every row.",
    )
    num_draft_tokens: Literal["auto"] | int = Field(
        "auto",
        description="Draft tokens per row and verification at most; many rows at a time want few, "
        "since each costs its share of the pass, a single row may take 10. `auto`: 3, and 10 for "
        "method `auto`, which often takes fewer.",
    )
    draft_confidence: float = Field(
        0.4,
        ge=0,
        le=1,
        description="A draft ends with the first token that the drafter's model finds less "
        "probable than this; 0: never. Without effect on `prompt_lookup` and under "
        "`ensemble_weight`.",
    )
    exit_layer: int | None = Field(
        None,
        ge=1,
        description="Layers of the target that `early_exit` drafts with, fewer than it has; models "
        "must be trained for it.",
    )
    ensemble_weight: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Accept more drafts at the price of other text: verify by `w * target + "
        "(1 - w) * drafter`, 0.7 is a good start. Unset: output is the target's own, exactly. For "
        "methods with probabilities: draft_model, early_exit, mtp, mtp_drafter.",
    )
    prompt_lookup_min: int = Field(
        2, ge=1, description="Tokens that must match before `prompt_lookup` drafts, at least."
    )
    prompt_lookup_max: int = Field(
        3, ge=1, description="Tokens that `prompt_lookup` tries to match, at most."
    )
    temperature: float = Field(0.0, ge=0, description="0 is greedy decoding.")
    top_k: int | None = Field(None, ge=1, description="Sample among the k most probable tokens.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling.")
    min_p: float | None = Field(None, ge=0, le=1, description="Floor relative to the best token.")
    repetition_penalty: float = Field(
        1.0, gt=0, description="As in transformers: over prompt and completion; 1 is none."
    )
    banned_tokens: list[int] = Field([], description="Token ids that are never generated.")
    max_new_tokens: int = Field(256, ge=1, description="Completion length at most, in tokens.")
    stop: list[str] = Field(
        [], description="Strings that end a completion; the text ends before them."
    )
    seed: int = Field(0, ge=0, description="Seed of sampling; a row's output depends on it alone.")
    on_too_long: Literal["auto", "truncate", "error", "split", "map_reduce"] = Field(
        "auto",
        description="Prompt too long: cut the document, make the row an error, translate it piece "
        "by piece (`split`), or summarise its pieces and then their summaries (`map_reduce`). "
        "`auto`: truncate for summaries, split for translations.",
    )
    audit_fraction: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the rows that are generated again at the end, plainly and as "
        "configured: how many agree, and what drafting saved by the clock.",
    )

    @field_validator("num_draft_tokens")
    @classmethod
    def _draft_length_possible(cls, value: str | int) -> str | int:
        if isinstance(value, int) and not 1 <= value <= 256:
            raise ValueError("must be `auto` or 1 to 256")
        return value

    @property
    def max_draft_tokens(self) -> int:
        """Per row and verification."""
        if isinstance(self.num_draft_tokens, int):
            return self.num_draft_tokens
        return 10 if self.method == "auto" else 3

    @model_validator(mode="after")
    def _exit_layer_given(self) -> "DecodingConfig":
        if self.method == "early_exit" and self.exit_layer is None:
            raise ValueError(
                "exit_layer: early_exit needs it; give the number of layers to draft with, such as "
                "a quarter of the model's"
            )
        return self

    @model_validator(mode="after")
    def _ensemble_has_probabilities(self) -> "DecodingConfig":
        if self.ensemble_weight is not None and self.method not in _PROBABILISTIC:
            raise ValueError(
                f"ensemble_weight: {self.method} drafts do without probabilities; unset it, or "
                f"choose a method of {', '.join(_PROBABILISTIC)}"
            )
        return self

    @model_validator(mode="after")
    def _lookup_sizes(self) -> "DecodingConfig":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min: {self.prompt_lookup_min} is above prompt_lookup_max="
                f"{self.prompt_lookup_max}; lower it"
            )
        return self

    @field_validator("stop")
    @classmethod
    def _stop_not_empty(cls, value: list[str]) -> list[str]:
        if any(not s for s in value):
            raise ValueError("an empty stop string would end every completion; remove it")
        return value
