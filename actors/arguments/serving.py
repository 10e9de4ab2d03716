"""The arguments of the HTTP server, its API and the configuration file."""

from __future__ import annotations

from actors.arguments.argument import Argument

__all__ = ["SERVING_ARGUMENTS"]

_OTHER_PARSERS = dict.fromkeys(
    ("llama", "llama3", "llama3_json", "llama4_pythonic", "pythonic", "mistral", "deepseekv3", "deepseekv31",
     "deepseek_v3", "kimi_k2", "glm", "glm45", "gpt-oss", "openai", "qwen3_coder", "qwen3_xml", "minimax-m2",
     "step3", "granite", "xlam"),
    "this form of tool calls is not read; use hermes for models that write JSON in <tool_call> blocks, else off",
)  # fmt: skip

SERVING_ARGUMENTS: tuple[Argument, ...] = (
    Argument(
        name="host",
        kind="str",
        default="127.0.0.1",
        group="HTTP server",
        help="Address to listen on. 0.0.0.0 or :: listens on every interface: set --api-key then.",
    ),
    Argument(
        name="allowed-hosts",
        kind="words",
        default=(),
        group="HTTP server",
        metavar="NAMES",
        help="Names that a request's Host header may have beside IP addresses, localhost, the name of this machine and "
        "that of --host; *.example.com stands for every name below example.com, * for every name. Without it the "
        "header is checked only where no API key protects a path: a page whose name was bound to this server's address "
        "has no key. With it the header is checked everywhere but at the probes.",
    ),
    Argument(
        name="allowed-origins",
        kind="words",
        default=(),
        group="HTTP server",
        metavar="ORIGINS",
        help="Pages of other origins that may call this server from a browser (CORS), such as http://localhost:3000; * "
        "for all.",
    ),
    Argument(
        name="allowed-methods",
        kind="words",
        default=("*",),
        group="HTTP server",
        metavar="METHODS",
        help="Methods that pages of the allowed origins may use; * for all.",
    ),
    Argument(
        name="allowed-headers",
        kind="words",
        default=("*",),
        group="HTTP server",
        metavar="NAMES",
        help="Request headers that pages of the allowed origins may send; * for all, Authorization included.",
    ),
    Argument(
        name="allow-credentials",
        kind="flag",
        default=False,
        group="HTTP server",
        help="Let pages of the allowed origins, each given by name, send cookies and the like, for a proxy in front "
        "that asks for them. API keys need no such permission.",
    ),
    Argument(
        name="port",
        kind="int",
        default=8000,
        minimum=0,
        maximum=65535,
        group="HTTP server",
        help="TCP port to listen on; 0 takes a free one and logs it.",
    ),
    Argument(
        name="fastapi-root-path",
        aliases=("root-path",),
        kind="str",
        default="",
        group="HTTP server",
        metavar="PATH",
        help="Path under which a proxy in front shows this server, such as /llm. Empty for none.",
    ),
    Argument(
        name="disable-page",
        kind="flag",
        default=False,
        group="HTTP server",
        help="Do without the live page: /, its scripts under /page and its feed under /stage are not there.",
    ),
    Argument(
        name="skip-server-warmup",
        kind="flag",
        default=False,
        group="HTTP server",
        help="Be ready without the warm-up requests; the first real request pays for them.",
    ),
    Argument(
        name="warmups",
        kind="names",
        default=("generate",),
        choices=("generate", "long-prompt", "batch"),
        group="HTTP server",
        metavar="NAMES",
        help="Warm-up requests to run before the server is ready, separated by commas: generate (a short answer), "
        "long-prompt (a prompt of one whole prefill chunk), batch (as many short answers at once as may run).",
    ),
    Argument(
        name="sse-keep-alive-interval",
        kind="float",
        default=15.0,
        minimum=0,
        maximum=3600,
        group="HTTP server",
        metavar="SECONDS",
        help="A stream that has nothing to send for this long gets a comment line, so that proxies keep it open. "
        "0 turns it off.",
    ),
    Argument(
        name="shutdown-timeout",
        kind="float",
        default=30.0,
        minimum=0,
        maximum=86400,
        group="HTTP server",
        metavar="SECONDS",
        help="After SIGTERM running requests may go on for this long; what is left then ends with an error.",
    ),
    Argument(
        name="request-timeout",
        kind="float",
        default=None,
        default_text="none",
        minimum=0,
        above=True,
        maximum=604800,
        group="HTTP server",
        metavar="SECONDS",
        help="The longest time from a request's arrival to its last token; it then ends with an error.",
    ),
    Argument(
        name="api-key",
        kind="str",
        default=None,
        default_text="no key is asked for",
        secret=True,
        group="API",
        metavar="KEYS",
        help="Clients must send this key, or one of several separated by commas: Authorization: Bearer KEY. Several "
        "keys get equal shares of the engine when there is more work than it can do. The list of processes shows it: "
        "prefer --api-key-file.",
    ),
    Argument(
        name="api-key-file",
        kind="str",
        default=None,
        default_text="the environment variable TROUPE_API_KEY, else none",
        group="API",
        metavar="FILE",
        help="File with the keys of --api-key, one a line.",
    ),
    Argument(
        name="admin-api-key",
        kind="str",
        default=None,
        default_text="administration is off",
        secret=True,
        group="API",
        metavar="KEY",
        help="The key of administrative endpoints (/flush_cache, aborting others' requests).",
    ),
    Argument(
        name="admin-api-key-file",
        kind="str",
        default=None,
        default_text="the environment variable TROUPE_ADMIN_API_KEY, else none",
        group="API",
        metavar="FILE",
        help="File with the key of --admin-api-key.",
    ),
    Argument(
        name="served-model-name",
        kind="words",
        default=None,
        default_text="the model path as given; of a GGUF file its general.name, or the file's name",
        group="API",
        metavar="NAMES",
        help="The model's names in the API. Requests may use any of them and are answered under the one they used; the "
        "first is the name in metrics and logs.",
    ),
    Argument(
        name="weight-version",
        kind="str",
        default="default",
        group="API",
        metavar="NAME",
        help="A label of the weights that /model_info and native answers show.",
    ),
    Argument(
        name="chat-template",
        kind="str",
        default=None,
        default_text="the model's own",
        group="API",
        metavar="TEMPLATE",
        help="The chat template to use: a Jinja file, Jinja text, the name of one of the model's own, or chatml or "
        "llama-3-instruct, which are built in.",
    ),
    Argument(
        name="trust-request-chat-template",
        kind="flag",
        default=False,
        group="API",
        help="Render templates that requests bring as chat_template, in a process of their own with limits on time and "
        "memory; otherwise they are refused.",
    ),
    Argument(
        name="completion-template",
        kind="str",
        default=None,
        default_text="none, and a suffix is refused",
        group="API",
        metavar="FILE",
        help="File with a Jinja template that joins prompt and suffix (its variables) of /v1/completions.",
    ),
    Argument(
        name="enable-cache-report",
        aliases=("enable-prompt-tokens-details",),
        kind="flag",
        default=False,
        group="API",
        help="Report prompt tokens found in the prefix cache as usage.prompt_tokens_details.cached_tokens.",
    ),
    Argument(
        name="sampling-defaults",
        aliases=("generation-config",),
        kind="str",
        default="model",
        choices=("model", "openai"),
        synonyms={"auto": "model", "vllm": "openai"},
        group="API",
        help="Sampling of requests that leave it out: model reads generation_config.json, openai takes the OpenAI "
        "API's (temperature 1, top_p 1).",
    ),
    Argument(
        name="tool-call-parser",
        kind="str",
        default=None,
        default_text="hermes",
        choices=("hermes", "off"),
        synonyms={"qwen": "hermes", "qwen25": "hermes", "qwen3": "hermes"},
        unbuilt_choices=_OTHER_PARSERS,
        group="API",
        metavar="FORM",
        help="How the model writes the calls of the tools that a chat request gives. hermes (also qwen, qwen25): JSON "
        "in <tool_call> blocks, which come back as tool_calls; the marks of calls and thoughts are shown then, special "
        "tokens or not, unless a request sets skip_special_tokens. off: what it writes stays text.",
    ),
    Argument(
        name="stream-interval",
        kind="int",
        default=1,
        minimum=1,
        maximum=1024,
        group="API",
        metavar="TOKENS",
        help="Tokens between two chunks of a stream; larger costs less and arrives later.",
    ),
    Argument(
        name="stream-output",
        kind="flag",
        default=False,
        group="API",
        help="Events of /generate streams hold only what is new. Otherwise they repeat the answer so far, and events "
        "of a long answer become rarer. Entries of the prompt come with the first event in both.",
    ),
    Argument(
        name="config",
        kind="str",
        default=None,
        default_text="none",
        group="Configuration file",
        metavar="FILE",
        help="YAML file of arguments by their long names. TROUPE_ARGS wins over it, and the command line over both.",
    ),
)
