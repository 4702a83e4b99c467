"""Text from folders: what is read, what is counted, what is refused."""

import gzip
import lzma
import os
import sys

import pytest

from shoestring.cli.main import main
from shoestring.errors import InputError
from shoestring.lab.tasks import load_task, load_text
from shoestring.lab.tasks.bpe import END, UNKNOWN
from shoestring.lab.tasks.corpus import is_split, joined, read_corpus
from shoestring.lab.tasks.prepared import save
from shoestring.lab.tasks.text import TextEncoder, encoded

DE = ["ein mann", "eine frau läuft", "ein hund", "zwei hunde laufen", "ein kind"]
EN = ["a man", "a woman runs", "a dog", "two dogs run", "a child"]


def write(folder, name, lines, end="\n"):
    path = folder / name
    data = "".join(line + end for line in lines).encode()
    if name.endswith(".xz"):
        data = lzma.compress(data)
    elif name.endswith(".gz"):
        data = gzip.compress(data)
    path.write_bytes(data)


@pytest.fixture
def text(tmp_path):
    for part in ("train", "valid", "test"):
        write(tmp_path, f"{part}.de", DE)
        write(tmp_path, f"{part}.en", EN)
    return tmp_path


def remarks(task, part="train"):
    return task.notes["remarks"].get(part, {})


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_the_plain_layout(text):
    task = load_task(str(text), merges=20)
    assert (task.source_language, task.target_language) == ("de", "en")
    assert task.notes["pairs"] == {"train": 5, "valid": 5, "test": 5} and not remarks(task)
    assert list(task.test_references) == EN
    for side, vocabulary, lines in zip(
        task.train, (task.source_vocabulary, task.target_vocabulary), (DE, EN), strict=True
    ):
        assert [joined(vocabulary.decode(side[n])) for n in range(5)] == lines


def test_names_with_additions_and_compressed_files(tmp_path):
    for part in ("train.lc.norm.tok", "val.lc.norm.tok", "test_2016_flickr.lc", "test_2017_x.lc"):
        write(tmp_path, f"{part}.de.xz", DE)
        write(tmp_path, f"{part}.en.gz", EN)
    files = load_text(str(tmp_path)).notes["files"]
    assert files["valid"] == ["val.lc.norm.tok.de.xz", "val.lc.norm.tok.en.gz"]
    assert files["test"][0] == "test_2016_flickr.lc.de.xz"
    write(tmp_path, "test.de", DE)
    write(tmp_path, "test.en", EN)
    assert load_text(str(tmp_path)).notes["files"]["test"] == ["test.de", "test.en"]


def test_a_known_name_inside_of_the_data_folder(text, monkeypatch):
    (text / "all").mkdir()
    for part in ("train", "valid", "test"):
        (text / f"{part}.de").rename(text / "all" / f"{part}.de")
        (text / f"{part}.en").rename(text / "all" / f"{part}.en")
    (text / "all").rename(text / "iwslt14.tokenized.de-en")
    assert load_text("iwslt14", folder=text).notes["pairs_trained_on"] == 5
    monkeypatch.setenv("SHOESTRING_DATA", str(text))
    assert load_text("iwslt14").notes["pairs_trained_on"] == 5
    with pytest.raises(InputError, match="no multi30k in"):
        load_text("multi30k")
    monkeypatch.delenv("SHOESTRING_DATA")
    with pytest.raises(InputError, match="multi30k needs the folder"):
        load_text("multi30k")
    with pytest.raises(InputError, match="no data is called 'nothing'"):
        load_task("nothing")


def test_empty_lines_are_counted_and_left_out_of_training_only(text):
    write(text, "train.de", [*DE[:2], "", "   ", *DE[4:]])
    write(text, "test.en", ["", *EN[1:]])
    task = load_text(str(text))
    assert remarks(task)["empty"] == {"pairs": 2, "first_lines": [3, 4]}
    assert task.notes["pairs_trained_on"] == len(task.train[0]) == 3
    assert remarks(task, "test")["empty"]["pairs"] == 1
    assert len(task.test[0]) == len(task.test_references) == 5


def test_bytes_that_are_no_text(text):
    data = (text / "train.en").read_bytes().replace(b"woman", b"wom\xffan")
    (text / "train.en").write_bytes(data)
    (text / "test.de").write_bytes((text / "test.de").read_bytes().replace(b"mann", b"m\xe4nn"))
    task = load_text(str(text))
    assert remarks(task)["not UTF-8"] == {"pairs": 1, "first_lines": [2]}
    assert task.notes["pairs_trained_on"] == 4
    assert remarks(task, "test")["not UTF-8"]["first_lines"] == [1] and len(task.test[0]) == 5


def test_sides_of_unequal_length(text):
    write(text, "train.en", EN[:4])
    with pytest.raises(InputError, match=r"train\.de has 5 lines, train\.en 4"):
        load_text(str(text))
    write(text, "train.en", [*EN, "", ""])
    task = load_text(str(text))
    assert remarks(task)["empty line after the other side's end"]["pairs"] == 2
    assert task.notes["pairs_trained_on"] == 5


def test_a_separator_of_lines_that_is_none(text):
    """Unicode's own line separator, inside of a sentence, must not move the rest."""
    write(text, "train.de", [DE[0] + "\u2028und\x85so", *DE[1:]])
    assert load_text(str(text)).notes["pairs_trained_on"] == 5


def test_windows_line_ends(text):
    write(text, "train.de", DE, end="\r\n")
    plain = load_text(str(text))
    assert "\r" not in "".join(plain.source_vocabulary.pieces)


def test_the_mark_of_some_editors_is_no_letter(text):
    plain = load_text(str(text), merges=20)
    (text / "train.de").write_bytes(b"\xef\xbb\xbf" + (text / "train.de").read_bytes())
    assert load_text(str(text), merges=20).source_vocabulary == plain.source_vocabulary


def test_text_of_16_bits_is_refused(text):
    """Most of its bytes are UTF-8, too: letters and zeros."""
    (text / "train.de").write_bytes("\n".join(DE).encode("utf-16"))
    with pytest.raises(InputError, match=r"train\.de is UTF-16"):
        load_text(str(text))


@pytest.mark.parametrize("lines", [["a b c"] * 5, DE], ids=["letters", "words"])
def test_no_merges_at_all(text, lines):
    """None asked for, or none to be found: pieces are letters."""
    write(text, "train.de", lines)
    write(text, "train.en", lines)
    task = load_text(str(text), merges=0 if lines is DE else 20)
    assert task.notes["merges"] == 0
    assert all(len(piece.removesuffix("@@")) == 1 for piece in task.source_vocabulary.pieces[4:])


def test_codes_of_another_version(text):
    (text / "code").write_text("#version: 0.3\na b\n")
    with pytest.raises(InputError, match=r"begin with '#version: 0\.3'"):
        load_text(str(text))
    (text / "code").write_text("e i\ni n</w>\n")
    assert load_text(str(text)).notes["merges"] == 2


def test_words_like_special_pieces_are_unknown(text):
    """As themselves they would end a sentence, or be its padding."""
    write(text, "train.en", ["a </s> b", "<s> a", "a <pad>", "<unk>", "a"] * 20)
    write(text, "train.de", DE * 20)
    task = load_text(str(text), merges=100)
    assert [task.train[1][n][:-1].count(UNKNOWN) for n in range(5)] == [1, 1, 1, 1, 0]
    assert all(min(task.train[1][n]) >= END for n in range(5))


def test_marks_that_are_words(text):
    """Headers of patches are not in pieces, and come out as they went in."""
    lines = ["@@ -1 +2 @@ eins", "zwei @@ drei", "vier@@ fünf", *["sechs @@"] * 200]
    for part in ("train", "valid", "test"):
        for language in ("de", "en"):
            write(text, f"{part}.{language}", lines)
    task = load_text(str(text), merges=300)
    assert task.codes is not None and list(task.test_references) == lines
    encode = TextEncoder(task.codes, task.source_vocabulary)
    for n in (0, 1, 3):
        assert encode(lines[n]) == task.train[0][n]
        assert joined(task.source_vocabulary.decode(task.train[0][n])) == lines[n]


def test_codes_are_learnt_on_words_where_one_side_is_in_pieces(text):
    write(text, "train.de", ["hal@@ lo wel@@ t"] * 5)
    codes = load_text(str(text), merges=50).codes
    assert "@" not in codes and "ha llo</w>" in codes


def test_the_folder_one_is_in_has_its_name(text, monkeypatch):
    monkeypatch.chdir(text)
    assert load_text(".", merges=20).name == text.name


def test_long_sentences_are_counted(text):
    write(text, "train.de", [*DE[:4], "ein " * 30])
    task = encoded(read_corpus(text, "text"), merges=20, longest=20)
    assert remarks(task)["longer than 20 pieces"] == {"pairs": 1, "first_lines": [5]}
    assert task.train[0].lengths.max() <= 20 and task.notes["pairs_trained_on"] == 4
    with pytest.raises(InputError, match="every sentence to train on is longer than 1"):
        encoded(read_corpus(text, "text"), merges=20, longest=1)


def test_text_that_is_in_pieces_already(text):
    """After BPE: as it is; what is before BPE beside it is split by the codes, or refused."""
    split = ["ein ma@@ nn", "eine fr@@ au läu@@ ft", "ein hund", "zwei hun@@ de", "ein ki@@ nd"]
    write(text, "train.de", split)
    write(text, "train.en", ["a m@@ an", *EN[1:]])
    assert is_split(split) and not is_split(DE)
    with pytest.raises(InputError, match=r"valid\.de is not in pieces"):
        load_text(str(text))
    for part in ("valid", "test"):
        write(text, f"{part}.de", split)
        write(text, f"{part}.en", ["a m@@ an", *EN[1:]])
    task = load_text(str(text))
    assert task.codes is None and task.source_vocabulary.decode(task.train[0][0]) == split[0]
    assert task.test_references[0] == "a man"


def test_codes_that_come_with_the_text_decide(text):
    write(text, "bpe-10k-codes.xz", ["#version: 0.2", "e i", "ei n</w>", "m a"])
    write(text, "train.de", ["ein mann", "eine frau@@ en", *DE[2:]])
    task = load_text(str(text))
    assert task.notes["merges"] == 3
    assert task.source_vocabulary.decode(task.train[0][0]) == "ein ma@@ n@@ n"
    again = remarks(task)["train.de: split again, by the codes beside it"]
    assert again["pairs"] == 5
    write(text, "bpe-10k-codes.xz", ["#version: 0.2", "e i n"])
    with pytest.raises(InputError, match="line 2 of the BPE codes is not a pair"):
        load_text(str(text))


def test_other_languages_must_be_named(text):
    for part in ("train", "valid", "test"):
        (text / f"{part}.de").rename(text / f"{part}.fr")
    with pytest.raises(InputError, match="has en, fr: from which language to which"):
        load_text(str(text))
    task = load_text(str(text), languages="en-fr")
    assert (task.source_language, task.target_language) == ("en", "fr")
    with pytest.raises(InputError, match="cannot read the languages 'french'"):
        load_text(str(text), languages="french")
    with pytest.raises(InputError, match=r"no train\.xx"):
        load_text(str(text), languages="xx-en")


def test_folders_without_text(tmp_path):
    with pytest.raises(InputError, match="no text to train on"):
        load_text(str(tmp_path))
    write(tmp_path, "train.de", ["", ""])
    write(tmp_path, "train.en", ["", ""])
    with pytest.raises(InputError, match=r"no valid\.de"):
        load_text(str(tmp_path))


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_a_part_without_lines(text, part):
    write(text, f"{part}.de", [])
    write(text, f"{part}.en", [])
    with pytest.raises(InputError, match=rf"{part}\.de and {part}\.en have no lines"):
        load_text(str(text))


def test_a_broken_archive(text):
    (text / "train.de").unlink()
    (text / "train.de.xz").write_bytes(b"no archive at all")
    with pytest.raises(InputError, match=r"cannot read .*train\.de\.xz"):
        load_text(str(text))
    (text / "train.de.xz").unlink()
    whole = gzip.compress(os.urandom(200))
    for damaged in (whole[:-50], whole[:10] + b"\xff" * 20 + whole[30:]):
        (text / "train.de.gz").write_bytes(damaged)
        with pytest.raises(InputError, match=r"cannot read .*train\.de\.gz"):
            load_text(str(text))


def test_what_was_prepared_is_found_again(text, monkeypatch):
    task = load_text(str(text), merges=20)
    (made,) = text.glob("prepared-20-*")
    assert {p.name for p in made.iterdir()} == {
        "codes", "notes.json", "pairs.npz", "references.test", "references.valid",
        "vocabulary.source", "vocabulary.target",
    }  # fmt: skip
    monkeypatch.setattr("shoestring.lab.tasks.prepared.encoded", None)  # it would be needed
    for where in (text, made):  # beside the text, and by itself
        again = load_text(str(where), merges=20)
        assert again.notes == task.notes and again.codes == task.codes
        assert again.test_references == task.test_references
        for part in ("train", "valid", "test"):
            for one, other in zip(getattr(task, part), getattr(again, part), strict=True):
                assert [one[n] for n in range(len(one))] == [other[n] for n in range(len(other))]


def test_a_prepared_folder_has_its_merges_and_languages(text, tmp_path_factory):
    made = tmp_path_factory.mktemp("prepared") / "text"
    task = load_text(str(text), merges=1000)
    save(task, made)
    assert task.notes["merges"] < 1000  # the text has no more
    for merges in (None, 1000, task.notes["merges"]):
        assert load_text(str(made), merges=merges, languages="de-en").notes == task.notes
    with pytest.raises(InputError, match=rf"prepared with {task.notes['merges']} merges, not 20"):
        load_text(str(made), merges=20)
    with pytest.raises(InputError, match="prepared from de-en, not en-de"):
        load_text(str(made), languages="en-de")


def test_prepare_replaces_nothing(text, tmp_path_factory, monkeypatch, capsys):
    out = tmp_path_factory.mktemp("out")  # empty: it may be there
    monkeypatch.setattr("warnings.showwarning", None)  # main() replaces it
    for merges, status, said in ((20, 0, ""), (10, 2, f"{out} is there and not empty")):
        command = ["shoestring", "prepare", str(text), "--out", str(out), "--merges", str(merges)]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as left:
            main()
        assert (left.value.code or 0) == status and said in capsys.readouterr().err
    assert load_text(str(out), merges=20).notes["merges_wanted"] == 20


def test_other_text_or_merges_are_prepared_anew(text):
    load_text(str(text), merges=20)
    load_text(str(text), merges=10)
    write(text, "train.de", [*DE[:4], "ein haus"])
    task = load_text(str(text), merges=20)
    assert joined(task.source_vocabulary.decode(task.train[0][4])) == "ein haus"
    assert len(list(text.glob("prepared-*"))) == 3


def test_a_folder_nobody_may_write_to(text, tmp_path_factory):
    os.chmod(text, 0o555)
    try:
        load_text(str(text), merges=20)
        assert not list(text.glob("prepared-*"))
        cached = os.listdir(os.environ["SHOESTRING_CACHE"])
        assert [name.startswith(f"{text.name}-prepared-20-") for name in cached] == [True]
    finally:
        os.chmod(text, 0o755)


def test_a_damaged_preparation(text):
    load_text(str(text), merges=20)
    (made,) = text.glob("prepared-20-*")
    pairs = (made / "pairs.npz").read_bytes()
    flipped = pairs[:80] + b"\xff" * 20 + pairs[100:]
    for name, damaged in (
        *(("pairs.npz", data) for data in (b"PK nothing", b"", pairs[:-50], flipped)),
        ("notes.json", b"[]"),
        ("vocabulary.source", b"<s>\n<pad>\n</s>\n<unk>\na\n"),
        ("references.test", b"a man\n"),
    ):
        whole = (made / name).read_bytes()
        (made / name).write_bytes(damaged)
        with pytest.raises(InputError, match="is damaged"):
            load_text(str(text), merges=20)
        (made / name).write_bytes(whole)
