"""The HTTP APIs, one package each: bodies, handlers, chunks of streams, and routes.

conversations.py     ConversationRequest: a chat as any API asks it; ``submit`` sends it to the engine
choice_reader.py     reads the text of one choice with the model's parser
events.py            the answer as neutral events, which each API writes in its own format
collecting.py        deltas of a stream as a whole answer
grammars.py          fields that constrain an answer, as response_format; tool_grammars.py: forced and strict tools
sessions.py          SGLang's sessions    routing.py: fields that name a replica
token_values.py      hidden states and experts of tokens in answers
"""
