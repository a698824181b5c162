"""Answers that people paste, in words of our own: the shapes of a chatbot's advice, in three languages."""

from __future__ import annotations

import codecs

MEMORY = {
    "en": """Your run on the **RTX 4070 (12 GB)** ends in the very first backward pass because of `compile=True` + `bfloat16`.

The line that matters:
```
buf1 = empty_strided_cuda((16, 1024, 50304), ...)   # \u2192 16 \u00d7 1024 \u00d7 50304 \u00d7 2 bytes = ~1.54 GB
```

### What to change in nanoGPT (100% success)
```python
batch_size = 12                    # was 16 \u2192 saves ~25% of memory
gradient_accumulation_steps = 40   # was 32 \u2192 same effective batch
n_layer = 12
n_head = 12
n_embd = 576
block_size = 1024
compile = False                    # <\u2500 the real cure
dtype = 'float16'                  # smaller than bfloat16
```
- both lines together: memory falls from ~11.8 GB \u2192 ~9.8 GB
- `float16` instead of `bfloat16` \u2192 another 10\u201315% less memory
- it stays below 10.5 GB

After some 100 steps:
```bash
compile = True
```
and in the end
```bash
batch_size = 16
gradient_accumulation_steps = 32
```
""",
    "es": """Tu ejecuci\u00f3n en la **RTX 4070 (12 GB)** muere en el primer pase backward con `compile=True` + `bfloat16`.

La l\u00ednea importante:
```
buf1 = empty_strided_cuda((16, 1024, 50304), ...)   # \u2192 16 \u00d7 1024 \u00d7 50304 \u00d7 2 bytes = ~1.54 GB
```

### Qu\u00e9 cambiar en nanoGPT (100% de \u00e9xito)
```python
batch_size = 12                    # era 16 \u2192 ahorra ~25% de memoria
gradient_accumulation_steps = 40   # era 32 \u2192 el mismo tama\u00f1o de lote
n_layer = 12
n_head = 12
n_embd = 576
block_size = 1024
compile = False                    # <\u2500 la soluci\u00f3n de verdad
dtype = 'float16'                  # m\u00e1s peque\u00f1o que bfloat16
```
- las dos juntas: la memoria baja de ~11.8 GB \u2192 ~9.8 GB
- `float16` en lugar de `bfloat16` \u2192 10\u201315% menos de memoria
- se queda por debajo de 10.5 GB

Despu\u00e9s de unos 100 pasos:
```bash
compile = True
```
y al final
```bash
batch_size = 16
gradient_accumulation_steps = 32
```
""",
    "de": """Dein Lauf auf der **RTX 4070 (12 GB)** stirbt im ersten Backward Pass, wegen `compile=True` + `bfloat16`.

Die entscheidende Zeile:
```
buf1 = empty_strided_cuda((16, 1024, 50304), ...)   # \u2192 16 \u00d7 1024 \u00d7 50304 \u00d7 2 Bytes = ~1.54 GB
```

### Was in nanoGPT zu \u00e4ndern ist (100% Erfolg)
```python
batch_size = 12                    # war 16 \u2192 spart ~25% Speicher
gradient_accumulation_steps = 40   # war 32 \u2192 gleiche effektive Gr\u00f6\u00dfe
n_layer = 12
n_head = 12
n_embd = 576
block_size = 1024
compile = False                    # <\u2500 die eigentliche L\u00f6sung
dtype = 'float16'                  # kleiner als bfloat16
```
- beides zusammen: der Speicher sinkt von ~11.8 GB \u2192 ~9.8 GB
- `float16` statt `bfloat16` \u2192 weitere 10\u201315% weniger Speicher
- es bleibt unter 10.5 GB

Nach rund 100 Schritten:
```bash
compile = True
```
und zum Schluss
```bash
batch_size = 16
gradient_accumulation_steps = 32
```
""",
}  # fmt: skip

NANOCHAT = {
    "en": """nanochat d32 (1.9B parameters) was trained on 38B tokens on 8\u00d7H100 in ~33 hours. On one RTX 4070 (12 GB of VRAM):

| setting | TFLOPS | time | notes |
|---|---|---|---|
| native bf16 | ~25\u201330 TFLOPS | impossible | needs 24\u201328 GB |
| 4-bit QLoRA + checkpointing | ~18\u201322 TFLOPS | ~35\u201345 days (850\u20131,100 hours) | the realistic one |
| 2.5-bit, experimental | ~22\u201326 TFLOPS | ~28\u201335 days | may be unstable |

It draws 200\u2013250 W \u2192 150\u2013200 kWh in all, at $0.30/kWh some $45\u201360.
A laptop 4070 (8 GB) takes another 50\u2013100% of time.
The smaller d21 (1.3B parameters) takes ~60\u201365% of the time.
With 15\u201320B tokens you are done in 12\u201320 days.
""",
    "es": """nanochat d32 (1.900 millones de par\u00e1metros) se entren\u00f3 con 38.000 millones de tokens en 8\u00d7H100 en ~33 horas. En una RTX 4070 (12 GB de VRAM):

| ajuste | TFLOPS | tiempo | notas |
|---|---|---|---|
| bf16 nativo | ~25\u201330 TFLOPS | Imposible | necesita 24\u201328 GB |
| 4 bits QLoRA + checkpointing | ~18\u201322 TFLOPS | ~35\u201345 d\u00edas (850\u20131.100 horas) | lo realista |
| 2.5 bits, experimental | ~22\u201326 TFLOPS | ~28\u201335 d\u00edas | inestable |

Consume 200\u2013250 W \u2192 150\u2013200 kWh en total, a $0.30/kWh unos $45\u201360.
Una 4070 port\u00e1til (8 GB) tarda otro 50\u2013100% de tiempo.
El d21 (1.300M par\u00e1metros) tarda ~60\u201365% del tiempo.
Con 15.000\u201320.000 millones de tokens terminas en 12\u201320 d\u00edas.
""",
    "de": """nanochat d32 (1,9 Milliarden Parameter) wurde mit 38 Milliarden Tokens auf 8\u00d7H100 in ~33 Stunden trainiert. Auf einer RTX 4070 (12 GB VRAM):

| Einstellung | TFLOPS | Zeit | Bemerkung |
|---|---|---|---|
| natives bf16 | ~25\u201330 TFLOPS | unm\u00f6glich | braucht 24\u201328 GB |
| 4-Bit QLoRA + Checkpointing | ~18\u201322 TFLOPS | ~35\u201345 Tage (850\u20131.100 Stunden) | realistisch |
| 2,5-Bit, experimentell | ~22\u201326 TFLOPS | ~28\u201335 Tage | instabil |

Sie zieht 200\u2013250 W \u2192 150\u2013200 kWh insgesamt, bei 0,30 \u20ac/kWh etwa 45\u201360 \u20ac.
Eine Laptop-4070 (8 GB) braucht 50\u2013100% mehr Zeit.
Das kleinere d21 (1,3 Milliarden Parameter) braucht ~60\u201365% der Zeit.
Mit 15\u201320 Milliarden Tokens bist du in 12\u201320 Tagen fertig.
""",
}  # fmt: skip

SPEED = {
    "en": """Why the first iteration took 27 seconds: compilation. Afterwards a ~40M parameter model, block size 1024, batch 16 \u00d7 grad-accum 32, reaches on an RTX 4070
**1.5 to 2.5 million tokens/s**, that is **80\u2013120 ms per iteration**.
With max_iters = 6000 that is 6000 \u00d7 ~0.1 s = 600 seconds, 10\u201320 minutes in all. MFU should be 25\u201340%, the "-100%" at first is noise.
""",
    "es": """Por qu\u00e9 la primera iteraci\u00f3n tom\u00f3 27 segundos: compilaci\u00f3n. Luego un modelo de ~40M par\u00e1metros, block size 1024, batch 16 \u00d7 grad-accum 32, llega en una RTX 4070 a
**1.5 a 2.5 millones de tokens/s**, es decir **80\u2013120 ms por iteraci\u00f3n**.
Con max_iters = 6000 son 6000 \u00d7 ~0.1 s = 600 segundos, 10\u201320 minutos en total. El MFU ser\u00e1 de 25\u201340%, el "-100%" del principio es ruido.
""",
    "de": """Warum die erste Iteration 27 Sekunden dauerte: Kompilieren. Danach schafft ein Modell mit ~40M Parametern, block size 1024, batch 16 \u00d7 grad-accum 32, auf einer RTX 4070
**1,5 bis 2,5 Millionen Tokens/s**, also **80\u2013120 ms pro Iteration**.
Mit max_iters = 6000 sind das 6000 \u00d7 ~0,1 s = 600 Sekunden, 10\u201320 Minuten insgesamt. Der MFU liegt bei 25\u201340%, die "-100%" am Anfang sind Rauschen.
""",
}  # fmt: skip


def misread(text: str, encoding: str) -> bytes:
    """UTF-8 that was read as one byte a character and written again: what many copies look like."""
    content = text.encode()
    if encoding == "utf-8":
        return content
    if encoding == "cp1252":  # which has no character for five bytes: programs keep the byte
        return "".join(
            bytes([b]).decode("cp1252") if b not in (0x81, 0x8D, 0x8F, 0x90, 0x9D) else chr(b)
            for b in content
        ).encode()
    return codecs.decode(content, encoding).encode()
