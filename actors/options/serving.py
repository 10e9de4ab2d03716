"""The arguments of the HTTP server, its API and the configuration file."""

from __future__ import annotations

from typing import Annotated, Literal

from actors.options.declaration import ArgumentSpec
from actors.options.model import ModelArguments

__all__ = ["ServingArguments", "ThoughtFormat", "ToolFormat"]

ToolFormat = Literal[
    "auto", "off", "hermes", "qwen3_coder", "llama3_json", "llama4", "pythonic", "mistral", "deepseekv3",
    "deepseekv31", "deepseekv32", "deepseek_v4", "kimi_k2", "glm45", "gpt-oss", "minimax-m1", "minimax-m2",
    "step3", "granite", "internlm", "phi4", "cohere", "gemma4", "lfm2", "functiongemma", "minimax-m3", "hy_v3",
    "hunyuan_a13b", "seed_oss", "longcat", "olmo3", "granite-20b-fc", "gigachat3", "gigachat35", "apertus", "minicpm5",
    "kimi_k3", "solar_open2", "dots", "k2_horizon", "inkling", "json", "passthrough",
]  # fmt: skip
"""Values of ``--tool-call-parser``; the registry of parsers has a class for each format."""

ThoughtFormat = Literal[
    "auto", "off", "base", "deepseek-r1", "deepseek-v3", "qwen3", "qwen3-thinking", "glm45", "kimi", "kimi_k2",
    "gpt-oss", "minimax", "mistral", "step3", "gemma", "nemotron", "cohere", "minimax-m3",
    "minimax-append-think", "hy_v3", "hunyuan_a13b", "ernie45", "seed_oss", "granite", "apertus", "solar_open2",
    "k2_horizon", "kimi_k3", "inkling",
]  # fmt: skip
"""Values of ``--reasoning-parser``; the registry of parsers has the marks of each format."""

_TOOL_NAMES = {
    **dict.fromkeys(("qwen", "qwen25", "qwen3", "granite4", "ernie45", "trinity"), "hermes"),
    **dict.fromkeys(("qwen_coder", "qwen3_xml", "step3p5", "mimo", "nemotron", "nemotron_v3"), "qwen3_coder"),
    **dict.fromkeys(("llama", "llama3", "llama4_json"), "llama3_json"),
    "llama4_pythonic": "llama4",
    **dict.fromkeys(("deepseek", "deepseek_v3"), "deepseekv3"),
    "deepseek_v31": "deepseekv31",
    "deepseek_v32": "deepseekv32",
    "deepseekv4": "deepseek_v4",
    **dict.fromkeys(("kimik2", "kimi"), "kimi_k2"),
    **dict.fromkeys(("glm", "glm47", "glm4_moe", "glm45_moe", "glm47_moe", "ling3", "poolside_v1", "spark25"), "glm45"),
    **dict.fromkeys(("openai", "gpt_oss", "harmony"), "gpt-oss"),
    **dict.fromkeys(("minimax", "minimax_m1"), "minimax-m1"),
    "minimax_m2": "minimax-m2",
    "minimax_m3": "minimax-m3",
    **dict.fromkeys(("hunyuan", "hy_v4"), "hy_v3"),
    "jamba": "hunyuan_a13b",
    "apertus2509": "apertus",
    "xlam": "json",
    **dict.fromkeys(("internlm2", "interns1"), "internlm"),
    **dict.fromkeys(("phi4_mini_json", "phi4mini"), "phi4"),
    **dict.fromkeys(("command", "cohere_command3", "cohere_command4"), "cohere"),
    "none": "off",
}
"""Names of SGLang, TokenSpeed and vLLM -> ours."""

_OTHER_TOOL_NAMES = {
    "muse": "calls in messages to a recipient, as Muse Glimmer writes them, are not read; use passthrough, which "
    "leaves them in the text",
}

_THOUGHT_NAMES = {
    "deepseek_r1": "deepseek-r1",
    **dict.fromkeys(("deepseek_v3", "deepseek_v31", "deepseek-v31", "deepseek-v4", "deepseek_v4"), "deepseek-v3"),
    **dict.fromkeys(("mimo", "interns1", "holo2", "poolside_v1", "telechat4"), "qwen3"),
    "qwen3_thinking": "qwen3-thinking",
    **dict.fromkeys(("glm47", "ling3"), "glm45"),
    **dict.fromkeys(("kimi_k25", "kimi-k2"), "kimi_k2"),
    **dict.fromkeys(("gpt_oss", "openai_gptoss", "harmony"), "gpt-oss"),
    **dict.fromkeys(("minimax_m2", "minimax-m2"), "minimax"),
    "minimax_m3": "minimax-m3",
    "minimax_m2_append_think": "minimax-append-think",
    **dict.fromkeys(("hunyuan", "hy_v4"), "hy_v3"),
    "apertus2509": "apertus",
    "step3p5": "step3",
    "gemma4": "gemma",
    **dict.fromkeys(("nemotron_v3", "nemotron_3", "nano_v3"), "nemotron"),
    **dict.fromkeys(("cohere_cmd", "cohere_command3", "cohere_command4"), "cohere"),
    **dict.fromkeys(("basic", "olmo3"), "base"),
    **dict.fromkeys(("none", "passthrough", "identity"), "off"),
}
"""Names of SGLang, TokenSpeed and vLLM -> ours."""


class ServingArguments(ModelArguments, frozen=True, kw_only=True):
    """The arguments of the HTTP server, its API and the configuration file."""

    host: Annotated[
        str,
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            help="Address to listen on. 0.0.0.0 or :: listens on every interface: set --api-key then.",
        ),
    ] = "127.0.0.1"

    allowed_hosts: Annotated[
        tuple[str, ...],
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            metavar="NAMES",
            help="Names allowed in the Host header, in addition to IP addresses, localhost, the name of this machine "
            "and that of --host; *.example.com allows every name below example.com, * every name. Without it the "
            "header is checked only on paths without an API key, against DNS rebinding. With it the header is "
            "checked everywhere but at the probes.",
        ),
    ] = ()

    allowed_origins: Annotated[
        tuple[str, ...],
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            metavar="ORIGINS",
            help="Origins whose pages may call this server from a browser (CORS), such as "
            "http://localhost:3000; * for all.",
        ),
    ] = ()

    allowed_methods: Annotated[
        tuple[str, ...],
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            metavar="METHODS",
            help="Methods that pages of allowed origins may use; * for all.",
        ),
    ] = ("*",)

    allowed_headers: Annotated[
        tuple[str, ...],
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            metavar="NAMES",
            help="Request headers that pages of allowed origins may send; * for all, including Authorization.",
        ),
    ] = ("*",)

    allow_credentials: Annotated[
        bool,
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            help="Let pages of allowed origins, each listed by name, send credentials such as cookies, for a proxy "
            "that requires them. API keys need no such permission.",
        ),
    ] = False

    port: Annotated[
        int,
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            minimum=0,
            maximum=65535,
            help="TCP port to listen on; 0 chooses a free one and logs it.",
        ),
    ] = 8000

    grpc_mode: Annotated[
        bool,
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            help="Serve SGLang's gRPC service, too, with gRPC's health and reflection: at --grpc-port of --host, "
            "without TLS, with the same keys and limits.",
        ),
    ] = False

    grpc_port: Annotated[
        int,
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            minimum=0,
            maximum=65535,
            help="TCP port of --grpc-mode; 0 chooses a free one and logs it.",
        ),
    ] = 50051

    fastapi_root_path: Annotated[
        str,
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            aliases=("root-path",),
            metavar="PATH",
            help="Path under which a proxy serves this server, such as /llm. Empty for none.",
        ),
    ] = ""

    disable_page: Annotated[
        bool,
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            help="Disable the live page: /, its scripts under /page and its feed under /stage.",
        ),
    ] = False

    skip_server_warmup: Annotated[
        bool,
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            help="Skip the warm-up requests; the first real requests are slower instead.",
        ),
    ] = False

    warmups: Annotated[
        tuple[Literal["generate", "long-prompt", "batch"], ...],
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            kind="names",
            metavar="NAMES",
            help="Warm-up requests to run before the server is ready, separated by commas: generate (a short answer), "
            "long-prompt (a prompt of a whole prefill chunk), batch (as many concurrent short answers as may run).",
        ),
    ] = ("generate",)

    sse_keep_alive_interval: Annotated[
        float,
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            minimum=0,
            maximum=3600,
            metavar="SECONDS",
            help="Send a comment line in a stream that is silent for this long, so that proxies keep it open. 0 "
            "disables it.",
        ),
    ] = 15.0

    shutdown_timeout: Annotated[
        float,
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            minimum=0,
            maximum=86400,
            metavar="SECONDS",
            help="After SIGTERM running requests may continue for this long; the rest then ends with an error.",
        ),
    ] = 30.0

    is_embedding: Annotated[
        bool,
        ArgumentSpec(
            group="HTTP server",
            help="The model was trained for embeddings, and generates no text: /v1/embeddings answers with its last "
            "hidden states. Models that say so themselves need no option.",
        ),
    ] = False

    file_storage_path: Annotated[
        str | None,
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            default_text="none",
            metavar="DIRECTORY",
            help="Keep the files and batches of /v1/files and /v1/batches in this directory, which no other server "
            "uses. Without it they are off.",
        ),
    ] = None

    file_storage_gib: Annotated[
        float,
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            minimum=0,
            maximum=1_000_000,
            above=True,
            metavar="GIB",
            help="Files and results of batches together have at most this size.",
        ),
    ] = 10.0

    response_store_mib: Annotated[
        int,
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            minimum=0,
            maximum=1_000_000,
            metavar="MIB",
            help="Keep responses and conversations of OpenAI's Responses API up to this size, the least recently used "
            "of which are deleted first: in memory, or with --file-storage-path in that directory. 0 keeps none.",
        ),
    ] = 256

    response_store_hours: Annotated[
        float,
        ArgumentSpec(
            group="HTTP server",
            server_only=True,
            minimum=0,
            maximum=1_000_000,
            above=True,
            metavar="HOURS",
            help="Delete stored responses and conversations that were not used for this long.",
        ),
    ] = 720.0

    request_timeout: Annotated[
        float | None,
        ArgumentSpec(
            group="HTTP server",
            default_text="none",
            minimum=0,
            above=True,
            maximum=604800,
            metavar="SECONDS",
            help="The longest time from a request's arrival to its last token, after which it ends with an error.",
        ),
    ] = None

    request_waiting_timeout: Annotated[
        float | None,
        ArgumentSpec(
            group="HTTP server",
            default_text="none",
            minimum=0,
            above=True,
            maximum=604800,
            metavar="SECONDS",
            help="The longest time a request waits for its start, after which it ends with status 503. SGLang names it "
            "SGLANG_REQ_WAITING_TIMEOUT.",
        ),
    ] = None

    api_key: Annotated[
        str | None,
        ArgumentSpec(
            group="API",
            default_text="no key is required",
            secret=True,
            metavar="KEYS",
            help="Clients must send this key, or one of several separated by commas: Authorization: Bearer KEY. "
            "Several keys get equal shares of an overloaded engine. Process listings show it: prefer --api-key-file.",
        ),
    ] = None

    api_key_file: Annotated[
        str | None,
        ArgumentSpec(
            group="API",
            default_text="the environment variable TROUPE_API_KEY, else none",
            metavar="FILE",
            help="File with the keys of --api-key, one per line.",
        ),
    ] = None

    admin_api_key: Annotated[
        str | None,
        ArgumentSpec(
            group="API",
            server_only=True,
            default_text="off with --api-key, open without",
            secret=True,
            metavar="KEY",
            help="The key of administrative endpoints (/flush_cache, aborting others' requests).",
        ),
    ] = None

    admin_api_key_file: Annotated[
        str | None,
        ArgumentSpec(
            group="API",
            server_only=True,
            default_text="the environment variable TROUPE_ADMIN_API_KEY, else none",
            metavar="FILE",
            help="File with the key of --admin-api-key.",
        ),
    ] = None

    served_model_name: Annotated[
        tuple[str, ...] | None,
        ArgumentSpec(
            group="API",
            default_text="the model path as given; of a GGUF file its general.name, or the file's name",
            metavar="NAMES",
            help="The model's names in the API. Requests may use any of them, and answers repeat it; the first is "
            "the name in metrics and logs.",
        ),
    ] = None

    weight_version: Annotated[
        str,
        ArgumentSpec(
            group="API",
            server_only=True,
            metavar="NAME",
            help="A label of the weights, reported by /model_info and native answers.",
        ),
    ] = "default"

    chat_template: Annotated[
        str | None,
        ArgumentSpec(
            group="API",
            default_text="the model's own",
            metavar="TEMPLATE",
            help="The chat template: a Jinja file, Jinja text, the name of one of the model's templates, or the "
            "built-in chatml or llama-3-instruct.",
        ),
    ] = None

    trust_request_chat_template: Annotated[
        bool,
        ArgumentSpec(
            group="API",
            help="Render templates that requests send as chat_template, in a separate process with limits of time "
            "and memory; otherwise they are refused.",
        ),
    ] = False

    completion_template: Annotated[
        str | None,
        ArgumentSpec(
            group="API",
            server_only=True,
            default_text="the form of Qwen Coder, StarCoder, DeepSeek Coder, Seed-Coder or Codestral, by its marks",
            metavar="FILE",
            help="File with a Jinja template that joins prompt and suffix (its variables) of /v1/completions.",
        ),
    ] = None

    multi_item_scoring_delimiter: Annotated[
        int | None,
        ArgumentSpec(
            group="API",
            server_only=True,
            default_text="none",
            minimum=0,
            maximum=2**31 - 1,
            metavar="TOKEN",
            help="Token id that stands between query and item where /v1/score scores label_token_ids. Each item reads "
            "the query, this token and itself.",
        ),
    ] = None

    enable_return_hidden_states: Annotated[
        bool,
        ArgumentSpec(
            group="API",
            help="Requests may set return_hidden_states: /generate, chats and completions then return final hidden "
            "states. Such a request computes its whole prompt and drafts no tokens.",
        ),
    ] = False

    enable_return_routed_experts: Annotated[
        bool,
        ArgumentSpec(
            group="API",
            help="Requests of /generate may set return_routed_experts: the answer has the experts that each token took "
            "in each layer. While one runs, steps are neither captured nor run as a program.",
        ),
    ] = False

    enable_cache_report: Annotated[
        bool,
        ArgumentSpec(
            group="API",
            server_only=True,
            aliases=("enable-prompt-tokens-details",),
            help="Report prompt tokens of the prefix cache as usage.prompt_tokens_details.cached_tokens.",
        ),
    ] = False

    sampling_defaults: Annotated[
        Literal["model", "openai"],
        ArgumentSpec(
            group="API",
            aliases=("generation-config",),
            synonyms={"auto": "model", "vllm": "openai"},
            help="Default sampling parameters of requests: model uses generation_config.json, openai those of the "
            "OpenAI API (temperature 1, top_p 1).",
        ),
    ] = "model"

    tool_call_parser: Annotated[
        ToolFormat | None,
        ArgumentSpec(
            group="API",
            server_only=True,
            default_text="auto",
            synonyms=_TOOL_NAMES,
            unbuilt_choices=_OTHER_TOOL_NAMES,
            metavar="FORM",
            help="The model's format of tool calls, which are returned as tool_calls. auto: by the chat template, then "
            "the family. passthrough or off: what it writes stays text. Names of SGLang, TokenSpeed and vLLM are "
            "aliases.",
        ),
    ] = None

    reasoning_parser: Annotated[
        ThoughtFormat | None,
        ArgumentSpec(
            group="API",
            server_only=True,
            default_text="auto",
            synonyms=_THOUGHT_NAMES,
            metavar="FORM",
            help="The model's format of reasoning (thoughts), which is returned as reasoning_content. auto: by the "
            "chat template, then the family. off: it stays in the text. Names of SGLang, TokenSpeed, vLLM are aliases.",
        ),
    ] = None

    stream_interval: Annotated[
        int,
        ArgumentSpec(
            group="API",
            minimum=1,
            maximum=1024,
            metavar="TOKENS",
            help="Tokens between two chunks of a stream; larger values cost less and delay output.",
        ),
    ] = 1

    stream_output: Annotated[
        bool,
        ArgumentSpec(
            group="API",
            server_only=True,
            help="Events of /generate streams contain only new output. Otherwise they repeat the output so far, and "
            "become rarer for long outputs. Prompt data comes with the first event in both modes.",
        ),
    ] = False

    config: Annotated[
        str | None,
        ArgumentSpec(
            group="Configuration file",
            default_text="none",
            metavar="FILE",
            help="YAML file of arguments by their long names. TROUPE_ARGS overrides it, and the command line overrides "
            "both.",
        ),
    ] = None
