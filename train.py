import sys; from onecard.cli import main  # noqa: E702, I001 - nanoGPT's door, two lines
raise SystemExit(main(["train", *sys.argv[1:]]))
