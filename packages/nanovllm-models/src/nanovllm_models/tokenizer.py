"""Text to token ids and back, and conversations to text: what a model directory says of both.

Built on transformers, imported on first use, as it takes seconds. This room must not know requests or HTTP.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import tokenizers
from numpy.typing import NDArray

from nanovllm_models.errors import ModelError, TemplateError, TemplateValueError
from nanovllm_models.segments import EncodingExchange, segment_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# What a template may raise, a program that gets whatever a request says.
TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class Tokenizer:
    """A model's tokenizer and chat template.

    backend: the tokenizer proper, for those who need its vocabulary or decoder. vocab_size: its tokens, added ones
    included. eos_token_id: the token that ends a turn, if it names one. has_chat_template: whether `render_chat` works.
    """

    def __init__(self, hf_tokenizer: "PreTrainedTokenizerFast", chat_template: str | None = None):
        self.backend: tokenizers.Tokenizer = hf_tokenizer.backend_tokenizer
        # A file may ask for both, which would cut or fill up prompts.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_id: int | None = hf_tokenizer.eos_token_id
        self.has_chat_template = chat_template is not None or hf_tokenizer.chat_template is not None
        self._segments = segment_encoder(self.backend)
        self._hf_tokenizer = hf_tokenizer
        self._chat_template = chat_template
        # Values that a caller of `render_chat` may give a template, but not under names that transformers takes itself.
        self._reserved = frozenset(inspect.signature(hf_tokenizer.apply_chat_template).parameters)

    @property
    def chat_template(self) -> str:
        """The source of the chat template; of all of them if the model has several, "" if it has none."""
        template = self._chat_template or self._hf_tokenizer.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def share_encodings(self, exchange: EncodingExchange) -> None:
        """Exchange encoded segments with other tokenizers of the same model, unless this one encodes texts whole."""
        if self._segments is not None:
            self._segments.share(exchange)

    def encode(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int32]:
        """Token ids of `text`, read-only; names of special tokens within it count as those.

        add_special_tokens: put what the model wants around a text (mostly a token for its beginning). Not for rendered
        conversations, whose template has done so.
        """
        if self._segments is not None and not add_special_tokens:
            return self._segments.encode(text)
        # For a batch the tokenizer gives up the interpreter's lock; "fast" leaves out the offsets of tokens.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids = np.array(encoding.ids, np.int32)
        token_ids.flags.writeable = False
        return token_ids

    def decode(self, token_ids: Sequence[int] | NDArray[np.int32], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no valid UTF-8 come out as U+FFFD."""
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
        """The text that the model reads for a conversation.

        messages: objects with `role`, `content` and what else the template knows.
        add_generation_prompt: end where the model's turn begins. continue_final_message: end within the last message.
        tools: JSON schemas of functions. documents: what the model may look up, mostly `title` and `text`.
        template_values: further names that the template may look at.
        Raises TemplateError, one line, when there is no template or it refuses the conversation; of that kind,
        TemplateValueError for a value under a name that is taken.
        """
        values = dict(template_values or {})
        if not self.has_chat_template:
            raise TemplateError("the model has no chat template")
        if reserved := sorted(self._reserved & values.keys()):
            raise TemplateValueError(f"{reserved[0]} can't be given to the chat template")
        try:
            return self._hf_tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                documents=None if documents is None else [dict(document) for document in documents],
                chat_template=self._chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **values,
            )
        except TEMPLATE_FAILURES as error:
            message = " ".join(str(error).split()) or type(error).__name__
            raise TemplateError(f"the chat template refuses these messages: {message}") from error


def load_tokenizer(path: Path | str, *, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model directory; takes about two seconds, most of them to import transformers.

    chat_template: a Jinja template to use rather than the model's own.
    Raises ModelError, one line, when there is none or it can't be read.
    """
    path = Path(path)
    if not path.is_dir():
        raise ModelError(f"{path} is not a directory: a model is given as a directory with its tokenizer's files")
    try:
        return Tokenizer(_load(path), chat_template)
    # A file that the tokenizers library can't parse ends in a bare Exception.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"can't load the tokenizer in {path}: {reason}") from error


def _load(path: Path) -> "PreTrainedTokenizerFast":
    if (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        # The file says all. Classes that are particular to a model would rebuild parts of it from what they assume.
        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)
