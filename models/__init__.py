"""Reference models and data: what `tfmixed compare` runs by default.

Plain Keras, no tfmixed inside: these are the models a person has before they
turn on mixed precision. Only the GAN is a `tfmixed.Model`, because it has two
optimizers. Each builder respects the global dtype policy that stands when it
is called:

```python
import keras
import models
from models.convnet import convnet

keras.config.set_dtype_policy("mixed_bfloat16")
model = convnet()

entry = models.get("convnet")    # the same builder with data that fits it
model = entry.builder()
(x_train, y_train), (x_val, y_val) = entry.data()
```

`python -m models` measures all of them; `models/README.md` has the results.
Importing this package imports neither TensorFlow nor a data library.
"""

from models.registry import Entry
from models.registry import get
from models.registry import names

__all__ = ["Entry", "get", "names"]
