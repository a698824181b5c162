"""Looking up a card by name: forgiving of spelling, never of meaning."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecard.errors import UserError
from onecard.hardware.cards import Card, all_cards, find_card, match_card, match_rates

BRANDS = {"nvidia", "geforce", "rtx", "rx"}
FORM_FACTORS = {"sxm", "sxm2", "pcie"}


def significant(name: str) -> frozenset[str]:
    """The test's own reading of a neatly written name: its words without brand, memory and form factor."""
    words = name.lower().split()
    return frozenset(w for w in words if w not in BRANDS | FORM_FACTORS and not re.fullmatch(r"\d+gb", w))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4070", "RTX 4070"),
        ("NVIDIA GeForce RTX 4070", "RTX 4070"),
        ("rtx-4070 12 GB", "RTX 4070"),
        ("GeForce(R) RTX™ 4070", "RTX 4070"),
        ("rtx4070 laptop", "RTX 4070 Laptop"),
        ("RTX 4070 Laptop GPU", "RTX 4070 Laptop"),
        ("RTX 4070 Mobile", "RTX 4070 Laptop"),
        ("RTX 4070 portátil", "RTX 4070 Laptop"),
        ("rtx 4070 para portátiles", "RTX 4070 Laptop"),
        ("4070 de escritorio", "RTX 4070"),
        ("tarjeta gráfica RTX 4070 Ti de sobremesa", "RTX 4070 Ti"),
        ("4070 für Laptops", "RTX 4070 Laptop"),
        ("Laptop-4070", "RTX 4070 Laptop"),
        ("Laptop-4070-Grafikkarte mit 8 GB", "RTX 4070 Laptop"),
        ("rtx4070 mobile", "RTX 4070 Laptop"),
        ("4070 desktop", "RTX 4070"),
        ("the 4070 Ti Super for desktops", "RTX 4070 Ti Super"),
        ("geforce 4070ti super", "RTX 4070 Ti Super"),
        ("4070 TI SUPER 16GB", "RTX 4070 Ti Super"),
        ("rtx4070tisuper", "RTX 4070 Ti Super"),
        ("4070ti", "RTX 4070 Ti"),
        ("RTXA6000", "RTX A6000"),
        ("4070 super", "RTX 4070 Super"),
        ("3060 12GB", "RTX 3060 12GB"),
        ("RTX 4060 Ti 8GB", "RTX 4060 Ti 8GB"),
        ("rtx4060ti 16 GB", "RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("NVIDIA TITAN RTX", "Titan RTX"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D"),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", "RTX 3080 Ti Laptop"),
        ("NVIDIA RTX 4000 SFF Ada Generation", "RTX 4000 SFF Ada"),
        ("NVIDIA RTX A4000", "RTX A4000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "PRO 6000 Workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "PRO 6000 Max-Q"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("A100-SXM4-40GB", "A100 40GB SXM"),
        ("a100 80gb sxm", "A100 80GB SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("h100 sxm5", "H100 SXM"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100 SXM2 32GB"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe 16GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA B200", "B200"),
        ("Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
    ],
)
def test_names_people_and_drivers_use(text: str, name: str) -> None:
    assert find_card(text).name == name


@pytest.mark.parametrize(
    ("text", "hinted"),
    [
        ("Quadro RTX 6000", "RTX 6000 Ada"),
        ("RTX 6000", "RTX 6000 Ada"),
        ("RTX 4060 Ti 12GB", "RTX 4060 Ti 8GB, RTX 4060 Ti 16GB"),
        ("RTX 4070 16GB", "RTX 4070"),
        ("RTX 3080 20GB", "RTX 3080 10GB"),
        ("RTX 3080 Super", "RTX 3080 10GB"),
        ("RTX A3000", "RTX A2000 6GB"),
        ("NVIDIA L40", "L40S"),
        ("A10G", "A10"),
        ("NVIDIA GB200", "B200"),
        ("NVIDIA H200 NVL", "H200 SXM"),
        ("Tesla V100-SXM3-32GB", "V100 SXM2"),
        ("RTX 5090 D", "RTX 5090"),
        ("RTX 5080 Laptop", "RTX 5080"),
        ("RX 7900 XT", "RX 7900 XTX"),
        ("Radeon 4070", "RTX 4070"),
        ("RTX 4700", "RTX 4070"),
        ("4070 supr", "RTX 4070 Super"),
        ("S40L", ""),
        ("4070 Τι", "RTX 4070"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", ""),
        ("banana", ""),
        ("", ""),
        ("GeForce RTX", ""),
    ],
)
def test_other_cards_and_typos_are_refused_with_the_near_ones(text: str, hinted: str) -> None:
    assert match_card(text) is None
    with pytest.raises(UserError) as caught:
        find_card(text)
    assert f"'{text}'" in caught.value.what
    assert hinted in caught.value.hint
    assert "onecard gpus" in caught.value.hint
    assert ("did you mean" in caught.value.hint) or not hinted


def test_a_swapped_digit_hints_at_the_right_card_first() -> None:
    with pytest.raises(UserError, match="RTX 4700") as caught:
        find_card("RTX 4700")
    assert caught.value.hint.startswith("did you mean RTX 4070,")


@pytest.mark.parametrize(
    ("text", "candidates"),
    [
        ("A100", ["A100 40GB SXM", "A100 80GB SXM", "A100 40GB PCIe", "A100 80GB PCIe"]),
        ("A100 80GB", ["A100 80GB SXM", "A100 80GB PCIe"]),
        ("RTX 4060 Ti", ["RTX 4060 Ti 8GB", "RTX 4060 Ti 16GB"]),
        ("rtx5060ti", ["RTX 5060 Ti 8GB", "RTX 5060 Ti 16GB"]),
        ("3060", ["RTX 3060 8GB", "RTX 3060 12GB"]),
        ("GeForce RTX 3080", ["RTX 3080 10GB", "RTX 3080 12GB"]),
        ("RTX 3080 Laptop", ["RTX 3080 Laptop 8GB", "RTX 3080 Laptop 16GB"]),
        ("RTX 3050", ["RTX 3050 6GB", "RTX 3050 8GB"]),
        ("RTX 2060", ["RTX 2060 6GB", "RTX 2060 12GB"]),
        ("RTX A2000", ["RTX A2000 6GB", "RTX A2000 12GB"]),
        ("RTX PRO 6000", ["PRO 6000 Workstation", "PRO 6000 Max-Q"]),
        ("V100", ["V100 SXM2 16GB", "V100 SXM2 32GB", "V100 PCIe 16GB", "V100 PCIe 32GB"]),
        ("A100 SXM4", ["A100 40GB SXM", "A100 80GB SXM"]),
        ("NVIDIA H100", ["H100 PCIe", "H100 SXM"]),
    ],
)
def test_an_ambiguous_name_lists_its_candidates(text: str, candidates: list[str]) -> None:
    assert match_card(text) is None
    with pytest.raises(UserError, match="more than one") as caught:
        find_card(text)
    assert all(name in caught.value.why for name in candidates)
    most = max(candidates, key=lambda name: find_card(name).memory_gb)
    assert f"'{most}'" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 4060 Ti", "RTX 4060 Ti"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060"),
        ("A100", "A100"),
        ("A100 SXM", "A100 SXM"),
        ("RTX 4070", "RTX 4070"),
        ("RTX 3080", None),  # not the same number of multiprocessors
        ("H100", None),
        ("banana", None),
    ],
)
def test_where_only_speed_matters_memory_need_not_be_said(text: str, name: str | None) -> None:
    found = match_rates(text)
    assert (found.name if found is not None else None) == name


def test_no_name_without_its_memory_hides_another_size() -> None:
    """Whoever has two sizes of a card in the table must be asked which."""
    for card in all_cards():
        bare = re.sub(r" \d+GB", "", card.name)
        others = [c for c in all_cards() if re.sub(r" \d+GB", "", c.name) == bare]
        assert (match_card(bare) is None) == (len(others) > 1), bare
        assert len(others) == 1 or all("GB" in c.name for c in others), bare


def test_reported_memory_breaks_the_tie() -> None:
    assert find_card("A100 SXM", memory_gib=39.4).name == "A100 40GB SXM"
    assert find_card("A100 SXM", memory_gib=79.3).name == "A100 80GB SXM"
    assert find_card("RTX 3080", memory_gib=9.77).name == "RTX 3080 10GB"
    assert find_card("RTX 3080", memory_gib=11.76).name == "RTX 3080 12GB"
    assert match_card("H100", memory_gib=79.6) is None  # both have 80 GB


def test_reported_memory_unmasks_a_namesake() -> None:
    """The driver calls both RTX 4060 Ti by the same name."""
    assert find_card("NVIDIA GeForce RTX 4060 Ti", memory_gib=15.996).name == "RTX 4060 Ti 16GB"
    assert find_card("NVIDIA GeForce RTX 4060 Ti", memory_gib=7.996).name == "RTX 4060 Ti 8GB"
    assert match_card("NVIDIA GeForce RTX 4070", memory_gib=7.996) is None
    with pytest.raises(UserError) as caught:
        find_card("NVIDIA GeForce RTX 4070", memory_gib=7.996)
    assert "different card" in caught.value.why


@pytest.mark.parametrize(
    ("name", "reported_mib"),
    [("T4", 15360), ("L4", 23034), ("L40S", 46068), ("A10", 23028), ("H200", 143771), ("RTX 4070", 12282)],
)
def test_drivers_report_less_than_the_box_says(name: str, reported_mib: int) -> None:
    assert match_card(name, reported_mib / 1024) is not None


@given(st.sampled_from(all_cards()), st.data())
def test_every_card_finds_itself_however_it_is_spelled(card: Card, data: st.DataObject) -> None:
    words = card.name.split()
    if words[0] in ("RTX", "RX") and data.draw(st.booleans()):
        words = words[1:]
    joint = st.sampled_from([" ", "-", "_", "  "])
    text = words[0]
    for word in words[1:]:
        # Glued words are fine ("4070TiSuper"), but a memory size needs room on both sides.
        glue = " " if re.search(r"\dGB", f"{text[-4:]} {word}") else ""
        text += data.draw(st.one_of(joint, st.just(glue))) + word
    text = "".join(data.draw(st.sampled_from([letter.lower(), letter.upper()])) for letter in text)
    maker = (
        "AMD Radeon " if card.name.startswith("RX") else data.draw(st.sampled_from(["NVIDIA ", "nvidia_"]))
    )
    text = data.draw(st.sampled_from(["", maker])) + text + data.draw(st.sampled_from(["", " GPU", " "]))
    assert find_card(text) is card


MODELS = sorted({word for card in all_cards() for word in significant(card.name) if re.search(r"\d", word)})


@given(
    st.sampled_from([*MODELS, "3080", "6000", "4000", "a4000", "l40", "a10g", "4060", "407", "40700", "h20"]),
    st.lists(
        st.sampled_from(["ti", "super", "laptop", "ada", "xt", "xtx", "d", "quadro", "nvl"]), max_size=3
    ),
    st.sampled_from(["", "8gb", "10gb", "12gb", "16gb", "80gb"]),
    st.data(),
)
def test_no_name_finds_a_card_with_other_words(
    model: str, extras: list[str], memory: str, data: st.DataObject
) -> None:
    words = data.draw(st.permutations([model, *extras, *([memory] if memory else [])]))
    found = match_card("RTX " + " ".join(words)) or match_card("RX " + " ".join(words))
    if found is not None:
        assert significant(found.name) == {model, *extras}
        assert not memory or found.memory_gb == float(memory.removesuffix("gb"))


@given(st.text(max_size=30))
def test_any_text_at_all_is_answered_or_refused_politely(text: str) -> None:
    try:
        card = find_card(text)
    except UserError:
        assert match_card(text) is None
    else:
        assert match_card(text) is card


def test_derived_rows_follow_from_clock_and_multiprocessors() -> None:
    derived = [card for card in all_cards() if card.note.startswith("derived")]
    assert len(derived) >= 45
    for card in derived:
        assert card.sm and card.boost_mhz and card.fp16acc
        if card.compute_capability == (7, 5):
            assert card.fp16 == pytest.approx(card.sm * card.boost_mhz * 512 / 1e6, rel=0.01), card.name
            assert card.fp16acc == pytest.approx(2 * card.fp16, rel=0.01), card.name
            assert card.bf16 is None and "no bf16" in card.note
            assert card.fp32 == pytest.approx(card.sm * card.boost_mhz * 128 / 1e6, rel=0.01), card.name
            continue
        assert card.fp32 == pytest.approx(card.sm * card.boost_mhz * 256 / 1e6, rel=0.02), card.name
        assert card.bf16 and card.tf32
        assert card.bf16 == pytest.approx(card.sm * card.boost_mhz * 512 / 1e6, rel=0.01), card.name
        # Consumer cards halve the fp32-accumulate rate, and tf32 halves it again.
        assert card.fp16acc == pytest.approx(2 * card.bf16, rel=0.01), card.name
        assert card.tf32 == pytest.approx(card.bf16 / 2, rel=0.01), card.name


def test_every_row_is_whole() -> None:
    names = [card.name for card in all_cards()]
    assert len(set(names)) == len(names) == 85
    for card in all_cards():
        assert card.note.split(";")[0].split()[0] in {"derived", "datasheet", "unverified"}
        assert card.memory_gb and card.bandwidth_gbps and card.tdp_w and card.fp32
        if size := re.search(r"(\d+)GB", card.name):
            assert card.memory_gb == float(size[1])
    assert find_card("RTX 5090").compute_capability == (12, 0)
    assert find_card("RX 7900 XTX").compute_capability is None


def test_peak_rates() -> None:
    assert find_card("4070").peak_tflops("bfloat16") == 58.3
    assert find_card("4070").peak_tflops("float16") == 58.3  # fp32 accumulation, not the doubled fp16 figure
    assert find_card("4070").peak_tflops("float32") == 29.1
    assert find_card("T4").peak_tflops("bfloat16") is None
    assert find_card("T4").peak_tflops("float16") == 65
    assert find_card("T4").peak_tflops("float32") == 8.1  # no tf32 there
    assert find_card("2080 Ti").peak_tflops("bfloat16") is None
    assert find_card("2080 Ti").peak_tflops("float16") == 53.8  # halved, as on every GeForce
    assert find_card("A100 80GB SXM").peak_tflops("float32") == 156  # tf32, which the trainer allows
    with pytest.raises(ValueError, match="int4"):
        find_card("T4").peak_tflops("int4")


def test_neither_cards_nor_machine_nor_show_import_torch_or_rich() -> None:
    code = (
        "import sys, onecard.hardware.cards, onecard.hardware.machine, onecard.hardware.show;"
        "print({'torch', 'rich', 'pynvml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
