"""A model's tokenizer and chat template. Only `load_tokenizer` imports transformers, which takes seconds."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import tokenizers
from numpy.typing import NDArray

from nanovllm_models.errors import ModelError, TemplateError, TemplateValueError
from nanovllm_models.length_bound import find_length_bound
from nanovllm_models.segments import EncodingExchange, make_segment_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Errors that a chat template, which is a program, may raise for a client's messages.
TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

# Template variables can't have these names. transformers passes the variables as keyword arguments next to the first
# three. Jinja and transformers define the other names, and templates use them.
RESERVED_NAMES = frozenset(
    ("self", "messages", "conversations", *jinja2.defaults.DEFAULT_NAMESPACE, "raise_exception", "strftime_now")
)


class Tokenizer:
    """A model's tokenizer and chat template.

    chat_template: Jinja source to use instead of the model's template; None for the model's template.
    backend: the same tokenizer as an object of the package `tokenizers`.
    vocab_size: number of tokens, including added tokens.
    eos_token_id: id of the token that ends a turn; None if the tokenizer's files name no such token.
    has_chat_template: whether there is a template; `render_chat` needs a template.
    """

    def __init__(self, hf_tokenizer: "PreTrainedTokenizerFast", chat_template: str | None = None):
        self.backend: tokenizers.Tokenizer = hf_tokenizer.backend_tokenizer
        # tokenizer.json may enable truncation and padding, which would change prompts.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_id: int | None = hf_tokenizer.eos_token_id
        self.has_chat_template = chat_template is not None or hf_tokenizer.chat_template is not None
        self._segment_encoder = make_segment_encoder(self.backend)
        self._length_bound = find_length_bound(self.backend)
        self._hf_tokenizer = hf_tokenizer
        self._chat_template = chat_template
        # `apply_chat_template` takes template variables as keyword arguments next to its own parameters.
        parameters = inspect.signature(hf_tokenizer.apply_chat_template).parameters
        self._reserved_names = RESERVED_NAMES.union(parameters)

    @property
    def chat_template(self) -> str:
        """Source of the chat template; several templates are joined by newlines; "" for no template."""
        template = self._chat_template or self._hf_tokenizer.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def share_encodings(self, exchange: EncodingExchange) -> None:
        """Share cached token ids with other processes. Does nothing if the tokenizer caches no segments."""
        if self._segment_encoder is not None:
            self._segment_encoder.share(exchange)

    def encode(self, text: str, *, add_special_tokens: bool, max_cached_tokens: int | None = None) -> NDArray[np.int32]:
        """Return the token ids of `text`: int32 [n], read-only. Names of special tokens in `text` become these tokens.

        add_special_tokens: whether to add the tokens that the model expects around a text. False for a conversation,
            to which the chat template has added these tokens.
        max_cached_tokens: if `text` has more tokens, its new segments are not cached; None for no limit.
        """
        if self._segment_encoder is not None and not add_special_tokens:
            return self._segment_encoder.encode(text, max_cached_tokens)
        # Unlike `encode`, `encode_batch_fast` releases the interpreter's lock and does not compute tokens' offsets.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids = np.array(encoding.ids, np.int32)
        token_ids.flags.writeable = False
        return token_ids

    def min_num_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`, much faster than `encode`; 0 if no bound is known."""
        return 0 if self._length_bound is None else self._length_bound.min_num_tokens(text)

    def decode(self, token_ids: Sequence[int] | NDArray[np.int32], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; bytes that are not valid UTF-8 become U+FFFD."""
        if isinstance(token_ids, np.ndarray):
            token_ids = token_ids.tolist()
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_values: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation as the text that the model reads.

        Raises TemplateError if the model has no template or the template refuses the conversation; TemplateValueError
        if a name in `template_values` is reserved.

        messages: objects with `role`, `content` and other fields that the template reads.
        add_generation_prompt: whether the text ends with the beginning of the model's turn.
        continue_final_message: whether the text ends within the last message, without its end tag.
        tools: JSON schemas of functions; None for no tools.
        documents: documents for retrieval, usually with `title` and `text`; None for no documents.
        template_values: additional variables of the template, by name.
        """
        variables = dict(template_values or {})
        if not self.has_chat_template:
            raise TemplateError("the model has no chat template")
        if reserved_names := sorted(self._reserved_names & variables.keys()):
            raise TemplateValueError(f"{reserved_names[0]} can't be given to the chat template: leave it out")
        try:
            return self._hf_tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                documents=None if documents is None else [dict(document) for document in documents],
                chat_template=self._chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **variables,
            )
        except TEMPLATE_FAILURES as error:
            message = " ".join(str(error).split()) or type(error).__name__
            raise TemplateError(f"the chat template refuses these messages: {message}") from error


def load_tokenizer(path: Path | str, *, chat_template: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model directory. Raises ModelError if the tokenizer is missing or invalid.

    chat_template: Jinja source to use instead of the model's template; None for the model's template.
    """
    path = Path(path)
    if not path.is_dir():
        raise ModelError(f"{path} is not a directory: pass a directory with the tokenizer's files")
    try:
        return Tokenizer(_load_hf_tokenizer(path), chat_template)
    # The tokenizers library raises a bare Exception for a file that it can't parse.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"can't load the tokenizer in {path}: {reason}") from error


def _load_hf_tokenizer(path: Path) -> "PreTrainedTokenizerFast":
    if (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        # This class takes everything from the file. A model's own class would replace parts of the tokenizer.
        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)
