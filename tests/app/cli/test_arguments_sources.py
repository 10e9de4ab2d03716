"""Arguments from the command line, TROUPE_ARGS and a YAML file."""

from pathlib import Path

import pytest

from actors.options import ArgumentError, Arguments
from actors.options.lora import AdapterPath
from app.cli.arguments import load_arguments
from app.understudy import MODEL_DIR
from app.understudy.adapters import ADAPTERS
from app.understudy.drafts import TOKEN_MAP, draft_path


def load(line: str = "", environment: str | None = None) -> Arguments:
    return load_arguments(line.split(), {} if environment is None else {"TROUPE_ARGS": environment})


def problems(line: str | None = "", environment: str | None = None) -> str:
    argv = None if line is None else line.split()
    with pytest.raises(ArgumentError) as caught:
        load_arguments(argv, {} if environment is None else {"TROUPE_ARGS": environment})
    return str(caught.value)


def config(folder: Path, text: str) -> str:
    file = folder / "config.yaml"
    file.write_text(text)
    return str(file)


def test_without_arguments_the_model_in_the_box_is_served() -> None:
    for arguments in (load(), load_arguments(None, {})):
        assert arguments.model_path == str(MODEL_DIR)
        assert arguments.model_name == "understudy"
    assert load("--served-model-name small").model_name == "small"


def test_the_adapters_of_the_box_have_names() -> None:
    paths = {each.name: each for each in load("--lora-paths pirate bard=poet").adapter_paths}
    assert {name: each.path for name, each in paths.items()} == {
        "pirate": str(ADAPTERS / "pirate"),
        "bard": str(ADAPTERS / "poet"),
    }
    named = '{"lora_name":"pirate","lora_path":"pirate","pinned":true}'
    assert load(f"--lora-paths {named}").adapter_paths == (AdapterPath("pirate", str(ADAPTERS / "pirate"), True),)
    assert load(environment="--lora-paths json").adapter_paths[0].path == str(ADAPTERS / "json")


def test_a_directory_and_another_model_hide_the_adapters_of_the_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("m --lora-paths pirate").adapter_paths == (AdapterPath("pirate", "pirate"),)
    (tmp_path / "pirate").mkdir()
    assert load("--lora-paths pirate").adapter_paths == (AdapterPath("pirate", "pirate"),)


def test_an_unknown_adapter_is_answered_with_the_names_of_the_box() -> None:
    found = problems("--lora-paths pirate parrot")
    assert found.startswith(
        "--lora-paths: 'parrot' is neither a directory nor an included adapter (json, pirate, poet); "
    )
    assert load("--lora-paths a/parrot").adapter_paths[0].path == "a/parrot"


@pytest.mark.parametrize("line", ["m", "--model m", "--model-path=m", "--model_path m", "-- m", "--port 1 m", "m m2 "])
def test_the_model(line: str) -> None:
    if line == "m m2 ":
        assert (
            problems(line)
            == "m2: unexpected; only one model can be given\nthe model m2: contradicts the model m; give one of them"
        )
        return
    assert load(line).model_path == "m"
    assert load(line).model_name == "m"


def test_the_model_twice() -> None:
    assert "contradicts" in problems("m --model other")
    assert load("m --model m").model_path == "m"


def test_values_and_flags() -> None:
    arguments = load("--stream-output m --max_num_seqs=3 --chunked-prefill-size -1 --no-enable-prefix-caching")
    assert arguments.stream_output
    assert arguments.max_running_requests == 3
    assert arguments.chunked_prefill_size == -1
    assert arguments.disable_radix_cache
    assert not load("--disable-radix-cache=false").disable_radix_cache
    assert load('--hf-overrides {"a":1}').json_model_override_args == {"a": 1}


@pytest.mark.parametrize("word", ["false", "False"])
def test_a_flag_takes_the_word_behind_it(word: str) -> None:
    arguments = load(f"--enable-metrics {word} m --no-enable-trace {word} --disable-page TRUE")
    assert (arguments.enable_metrics, arguments.enable_trace, arguments.disable_page) == (False, True, True)
    assert arguments.model_path == "m"
    assert load("--disable-page m").model_path == "m"
    assert load(environment=f"--enable-metrics {word}").enable_metrics is False


def test_the_last_of_equal_names_wins() -> None:
    assert load("--port 1 --port 2").port == 2
    assert "contradicts --max-num-seqs" in problems("--max-num-seqs 1 --max-running-requests 2")


@pytest.mark.parametrize("line", ["--port", "--port --stream-output", "--api-key", "--max-total-tokens"])
def test_a_value_is_missing(line: str) -> None:
    assert f"{line.split()[0]}: needs a value" in problems(line)


@pytest.mark.parametrize("name", ["--served-model-name", "--lora-paths", "--cuda-graph-bs"])
def test_a_list_of_values_is_missing(name: str) -> None:
    assert f"{name}: needs one or more values" in problems(f"{name} --port 8000")
    assert f"{name}: needs one or more values" in problems(name)


@pytest.mark.parametrize("value", ["", "[]", ","])
def test_an_empty_list_of_names_is_refused(value: str) -> None:
    with pytest.raises(ArgumentError, match=r"^--served-model-name must not be empty; leave it out for the default$"):
        load_arguments(["m", "--served-model-name", value], {})


def test_refused_and_unknown_names() -> None:
    errors = problems(
        "--encoder-only --numa-node 1 2 --enable-lora-bias --tempreature 1 -encoder-only --schedule-polisy lpm m"
    )
    assert "--encoder-only: encoder disaggregation" in errors
    assert "--numa-node: binding" in errors
    assert "--enable-lora-bias: adapters have no biases" in errors
    assert "--tempreature: there is no such argument" in errors
    assert "\n-encoder-only: encoder disaggregation" in errors
    assert "--schedule-polisy: there is no such argument; did you mean --schedule-policy?" in errors
    assert "unexpected" not in errors
    assert "contradicts" not in errors


def test_harmless_recipes_of_other_engines_work() -> None:
    load("m --tensor-parallel-size 1 --kv-cache-dtype auto --enforce-eager --block-size 16 --nnodes 1 --enable-metrics")


def test_the_environment() -> None:
    arguments = load("", "--model-path 'a b' --api-key \"k k\" --stream-output")
    assert arguments.model_path == "a b"
    assert arguments.api_key == "k k"
    assert arguments.stream_output
    assert "--prot in TROUPE_ARGS: there is no such argument; did you mean --port?" in problems("", "--prot 3")
    assert "TROUPE_ARGS: No closing quotation" in problems("", "--model 'a")


def test_keys_are_read_from_files_one_a_line(tmp_path: Path) -> None:
    users, admin = tmp_path / "users", tmp_path / "admin"
    users.write_text("\ufeff key-1 \r\n\n two,three\n", encoding="utf-8")
    admin.write_text("root\n")
    arguments = load(f"--api-key-file {users} --admin-api-key-file {admin}")
    assert arguments.api_keys == ("key-1", "two", "three")
    assert arguments.admin_api_key == "root"
    assert arguments.api_key_file == str(users)
    assert arguments.describe()["api_key"] == "***"
    assert "key-1" not in repr(arguments)
    assert Arguments.from_keywords(api_key_file=users).api_keys == ("key-1", "two", "three")


def test_keys_of_the_environment_give_way_to_arguments(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("of-file")
    environ = {"TROUPE_API_KEY": " one, two ", "TROUPE_ADMIN_API_KEY": "root"}
    arguments = load_arguments([], environ)
    assert arguments.api_keys == ("one", "two")
    assert arguments.admin_api_key == "root"
    assert load_arguments(["--api-key", "given"], environ).api_keys == ("given",)
    assert load_arguments(["--api-key-file", str(file)], environ).api_keys == ("of-file",)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b" \n,\n", "contains no key, so the server would be open to all"),
        (b"a\x00b", "a key with a control character"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"k\n" * 40_000, "is larger than 65536 bytes"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_key_file_that_holds_none_is_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    errors = problems(f"--api-key-file {file}")
    assert f"--api-key-file: {file} " in errors
    assert reason in errors


def test_keys_that_leave_it_open_access_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo")
    assert "--api-key and --api-key-file are both given" in problems(f"--api-key k --api-key-file {file}")
    assert "--admin-api-key: there can be only one" in problems(f"--admin-api-key-file {file}")
    with pytest.raises(ArgumentError, match="TROUPE_API_KEY contains no key"):
        load_arguments([], {"TROUPE_API_KEY": ""})
    with pytest.raises(ArgumentError, match=r"api_key_file is read by Arguments\.from_keywords"):
        Arguments(api_key_file=str(file))


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_a_key_file_that_every_user_may_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    file = tmp_path / "keys"
    file.write_text("one")
    file.chmod(mode)
    assert load(f"--api-key-file {file}").api_keys == ("one",)
    assert (f"every user of this machine may read {file}; chmod 600 it" in caplog.text) == (mode == 0o644)


def test_without_a_command_line_the_asgi_server_decides_where_to_listen() -> None:
    assert "port: without a command line the ASGI server decides" in problems(None, "--port 9000")
    assert load("", "--port 9000").port == 9000


def test_the_file(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        "model: m\nmax-running-requests: 7\nenable_prefix_caching: false\nwarmups: [batch, generate]\n"
        "hf-overrides: {rope: {a: 1}}\napi-key: 123\nrequest-timeout: null\nshutdown-timeout: 5\n",
    )
    arguments = load(f"--config {path}")
    assert arguments.model_path == "m"
    assert arguments.max_running_requests == 7
    assert arguments.disable_radix_cache
    assert arguments.warmups == ("batch", "generate")
    assert arguments.json_model_override_args == {"rope": {"a": 1}}
    assert arguments.api_key == "123"
    assert arguments.request_timeout is None
    assert arguments.shutdown_timeout == 5.0
    assert arguments.config == path


def test_precedence(tmp_path: Path) -> None:
    path = config(tmp_path, "port: 1\nmax-num-seqs: 1\nstream-interval: 1\ndisable-radix-cache: true\n")
    arguments = load("--port 3 --enable-prefix-caching", f"--config {path} --port 2 --max-running-requests 2")
    assert arguments.port == 3
    assert arguments.max_running_requests == 2
    assert arguments.stream_interval == 1
    assert not arguments.disable_radix_cache


def test_wrong_files(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in problems(f"--config {tmp_path}/none.yaml")
    assert "cannot be read" in problems(f"--config {tmp_path}")
    assert "is not YAML" in problems(f"--config {config(tmp_path, 'a: [')}")
    assert "must hold names and values" in problems(f"--config {config(tmp_path, '- a')}")
    assert "a name must be text" in problems(f"--config {config(tmp_path, '1: 2')}")
    assert "cannot name another" in problems(f"--config {config(tmp_path, 'config: x.yaml')}")
    assert "small" in problems(f"--config {config(tmp_path, '#' * (1 << 20) + ' ')}")
    assert "is not YAML" in problems(f"--config {config(tmp_path, '!!python/object/apply:os.getcwd []')}")
    path = config(tmp_path, "max-nun-seqs: 3\nenable-lora-bias: true\nport: 70000\nenable-eplb: false\n")
    errors = problems(f"--config {path}")
    assert f"max-nun-seqs in {path}: there is no such argument; did you mean max-num-seqs?" in errors
    assert f"enable-lora-bias in {path}: adapters have no biases" in errors
    assert f"port in {path}: must be an integer from 0 to 65535" in errors
    assert "eplb" not in errors


def test_an_empty_file_is_fine(tmp_path: Path) -> None:
    assert load(f"--config {config(tmp_path, '')}").max_running_requests == Arguments().max_running_requests


def test_all_problems_are_reported_at_once() -> None:
    assert len(problems("--port x --enable-lora-bias", "--prot 1").splitlines()) == 3


def test_problems_of_several_options_spell_them_as_options() -> None:
    assert problems("--nccl-port 7").startswith("--nccl-port needs --tensor-parallel-size or --pipeline-parallel-size:")
    assert problems("--cluster ray").startswith("--cluster needs --nnodes of at least 2, and no --node-rank:")
    assert problems("--warmups batch --skip-server-warmup").startswith("--warmups contradicts --skip-server-warmup;")
    both = problems("--enable-dynamic-batch-tokenizer --disable-tokenizer-batch-encode")
    assert "contradicts --disable-tokenizer-batch-encode;" in both


def test_the_model_in_the_box_has_drafts_in_the_box() -> None:
    for words in (["--speculative-algorithm", "EAGLE3"], [str(MODEL_DIR), "--speculative-algorithm", "EAGLE3"]):
        assert load_arguments(words, {}).speculative_draft_model_path == str(draft_path("EAGLE3"))
    assert load_arguments(["--speculative-algorithm", "NGRAM"], {}).speculative_draft_model_path is None
    assert load_arguments(["--speculative-algorithm", "NEXTN"], {}).speculative_draft_model_path == str(
        draft_path("EAGLE")
    )
    assert load_arguments(["--speculative-algorithm", "MTP"], {}).speculative_token_map == str(TOKEN_MAP)
    assert load_arguments(["--speculative-algorithm", "EAGLE3"], {}).speculative_token_map is None
    whole = ["--speculative-algorithm", "MTP", "--speculative-token-map", "none"]
    assert load_arguments(whole, {}).speculative_token_map is None
    deep = load_arguments(["--speculative-algorithm", "EAGLE3"], {})
    assert (deep.speculative_num_steps, deep.speculative_eagle_topk, deep.speculative_num_draft_tokens) == (7, 1, 8)
    assert load_arguments(["--speculative-algorithm", "DFLASH"], {}).speculative_num_draft_tokens == 8
    sized = load_arguments(["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "2"], {})
    assert (sized.speculative_num_steps, sized.speculative_num_draft_tokens) == (2, None)
    assert sized.speculative_token_map == str(TOKEN_MAP)
    block = load_arguments(["--speculative-algorithm", "DFLASH", "--speculative-dflash-block-size", "16"], {})
    assert (block.speculative_num_draft_tokens, block.speculative_dflash_block_size) == (None, 16)
    own = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "mine"]
    assert load_arguments(own, {}).speculative_draft_model_path == "mine"
    assert load_arguments(own, {}).speculative_num_steps is None
    other = load_arguments(["some/model", "--speculative-algorithm", "EAGLE3"], {})
    assert other.speculative_draft_model_path is None


def test_recipes_with_one_object_of_speculation_are_read() -> None:
    config = '{"method": "eagle3", "model": "d", "num_speculative_tokens": 4}'
    arguments = load_arguments(["m", "--speculative-config", config], {})
    assert arguments.speculative_algorithm == "EAGLE3"
    assert (arguments.speculative_draft_model_path, arguments.speculative_num_steps) == ("d", 4)
