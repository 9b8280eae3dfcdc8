"""Text that a model of characters writes."""

from typing import Any

import numpy as np

from models.arguments import check_positive
from models.data import VOCABULARY
from models.data import decode


def sample(
    model: Any,
    prompt: str,
    length: int = 200,
    temperature: float = 0.7,
    seed: int = 0,
) -> str:
    """Lets a model write on, one character at a time.

    Args:
        model: a causal model of the characters of `models.data`, such as
            `gpt` or `transformer`, with probabilities or logits.
        prompt: the text to begin with.
        length: number of characters to add.
        temperature: 1 draws as the model says, less keeps to the likelier
            characters, 0 takes the likeliest.
        seed: the same seed gives the same text.

    Returns:
        The prompt and what follows it. Characters that are not in the
        vocabulary come back as the replacement character.

    Raises:
        ValueError: the prompt is empty, or a number is out of range.

    Example:

    ```python
    print(sample(model, "The statement ", length=80))
    ```
    """
    check_positive("sample", length=length)
    if not prompt:
        raise ValueError(
            "`sample` got `prompt=''`. Expected at least one character that "
            "the model can go on from. Pass for example `prompt='The '`."
        )
    if not 0 <= temperature < np.inf:
        raise ValueError(
            f"`sample` got `temperature={temperature!r}`. Expected a number "
            "from 0 up. Pass for example `temperature=0.7`."
        )
    window = model.inputs[0].shape[1] or 128
    head = model.get_layer("predictions").activation
    gives_logits = getattr(head, "__name__", "") == "linear"
    random = np.random.RandomState(seed)
    ids = [VOCABULARY.find(character) + 1 for character in prompt]
    for _ in range(length):
        seen = ids[-window:]
        # One shape for every call, so that the model is traced once. What
        # stands to the right of the text changes nothing: it is not seen.
        tokens = np.zeros((1, window), "int32")
        tokens[0, : len(seen)] = seen
        outputs = np.asarray(model.predict_on_batch(tokens))
        logits = outputs[0, len(seen) - 1].astype("float32")
        if not gives_logits:
            logits = np.log(np.maximum(logits, np.finfo("float32").tiny))
        # With this noise the largest is a character as often as the softmax
        # of `logits / temperature` says, and no quotient or sum can fail.
        noise = random.gumbel(size=logits.shape)
        ids.append(int(np.argmax(logits + temperature * noise)))
    return decode(np.asarray(ids))
