# ruff: noqa: RUF001 control tokens are written with such letters
"""Chat templates with tool calls in the manner of released ones, and a tokenizer that has their control tokens."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mla_jax.text.chat import ChatTemplate
from mla_jax.text.tokenizer import Tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
DEEPSEEK = """
    <｜User｜> <｜Assistant｜> <think> </think> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜>
    <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜>
    <｜tool▁output▁end｜> ｜DSML｜
"""
KIMI_TOKENS = """
    <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|> <|tool_calls_section_begin|> <|tool_calls_section_end|>
    <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> [EOS]
"""
GLM_TOKENS = """
    [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value>
    </arg_value> <tool_response> </tool_response> /nothink
"""

V31 = """{%- set thinking = thinking if thinking is defined else false -%}
{%- set ns = namespace(asked=false, result=false) -%}{{ bos_token }}
{%- for m in messages -%}
  {%- if m['role'] == 'system' -%}{{ m['content'] }}
  {%- elif m['role'] == 'user' -%}{%- set ns.asked = true -%}{%- set ns.result = false -%}{{ '<｜User｜>' + m['content'] }}
  {%- elif m['role'] == 'tool' -%}{%- set ns.asked = false -%}{%- set ns.result = true -%}
    {{- '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}
  {%- elif m['tool_calls'] is defined and m['tool_calls'] is not none -%}
    {{- '<｜Assistant｜></think>' if ns.asked else '' -}}{%- set ns.asked = false -%}
    {%- if m['content'] is not none -%}{{ m['content'] }}{%- endif -%}{{ '<｜tool▁calls▁begin｜>' }}
    {%- for call in m['tool_calls'] -%}
      {{- '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' + call['function']['arguments'] -}}
      {{- '<｜tool▁call▁end｜>' -}}
    {%- endfor -%}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
  {%- else -%}
    {{- '<｜Assistant｜></think>' if ns.asked else '' -}}{%- set ns.asked = false -%}
    {%- set content = m['content'] -%}
    {%- if '</think>' in content -%}{%- set content = content.split('</think>', 1)[1] -%}{%- endif -%}
    {{ content + '<｜end▁of▁sentence｜>' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.asked and not ns.result -%}
  {{ '<｜Assistant｜>' }}{{ '<think>' if thinking else '</think>' }}
{%- endif -%}"""

# Calls are written where there is no content, and in a block of JSON
R1 = """{%- set ns = namespace(result=false, first=true) -%}{{ bos_token }}
{%- for m in messages -%}
  {%- if m['role'] == 'user' -%}{%- set ns.result = false -%}{{ '<｜User｜>' + m['content'] }}{%- endif -%}
  {%- if m['role'] == 'assistant' and m['content'] is none -%}{%- set ns.first = true -%}
    {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' -}}
    {%- for call in m['tool_calls'] -%}
      {{- ('' if loop.first else '\\n') + '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] -}}
      {{- '\\n```json\\n' + call['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' -}}
    {%- endfor -%}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
  {%- endif -%}
  {%- if m['role'] == 'assistant' and m['content'] is not none -%}
    {{- '<｜tool▁outputs▁end｜>' if ns.result else '<｜Assistant｜>' -}}{%- set ns.result = false -%}
    {%- set content = m['content'] -%}
    {%- if '</think>' in content -%}{%- set content = content.split('</think>')[-1] -%}{%- endif -%}
    {{ content + '<｜end▁of▁sentence｜>' }}
  {%- endif -%}
  {%- if m['role'] == 'tool' -%}
    {{- '\\n' if ns.result else '<｜tool▁outputs▁begin｜>' -}}{%- set ns.result = true -%}
    {{- '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if ns.result -%}{{ '<｜tool▁outputs▁end｜>' }}
{%- elif add_generation_prompt -%}{{ '<｜Assistant｜><think>\\n' }}{%- endif -%}"""

KIMI = """{%- macro text(m) -%}{%- set c = m.get('content') -%}
  {%- if c is string -%}{{ c }}{%- elif c is not none -%}{{ c[0]['text'] }}{%- endif -%}{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for at in range(messages|length - 1, -1, -1) -%}
  {%- if messages[at]['role'] == 'assistant' and not messages[at].get('tool_calls') -%}
    {%- set ns.last = at -%}{%- break -%}
  {%- endif -%}
{%- endfor -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson() }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
  {%- set name = m.get('name') or m['role'] -%}
  {{- ({'user': '<|im_user|>', 'assistant': '<|im_assistant|>'}[m['role']] or '<|im_system|>') + name + '<|im_middle|>' -}}
  {%- if m['role'] == 'assistant' -%}
    {{- '<think>' -}}{%- if loop.index0 > ns.last -%}{{ m.get('reasoning_content', '') }}{%- endif -%}
    {{- '</think>' -}}{{ text(m) }}
    {%- if m.get('tool_calls') -%}<|tool_calls_section_begin|>
      {%- for call in m['tool_calls'] -%}
        <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
        {%- set given = call['function']['arguments'] -%}
        {%- if given is string -%}{{ given }}{%- else -%}{{ given | tojson }}{%- endif -%}<|tool_call_end|>
      {%- endfor -%}<|tool_calls_section_end|>
    {%- endif -%}
  {%- elif m['role'] == 'tool' -%}## Return of {{ m.tool_call_id }}
{{ text(m) }}
  {%- else -%}{{ text(m) }}
  {%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""

GLM = """[gMASK]<sop>{%- if tools -%}<|system|># Tools
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor -%}
{%- endif -%}
{%- macro text(content) -%}{%- if content is string -%}{{ content }}{%- else -%}{{ content }}{%- endif -%}{%- endmacro -%}
{%- set ns = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}<|user|>{{ text(m.content) }}
  {%- elif m.role == 'system' -%}<|system|>{{ text(m.content) }}
  {%- elif m.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|observation|>{%- endif -%}
    <tool_response>{{ m.content }}</tool_response>
  {%- else -%}<|assistant|>
    {%- set thought = '' -%}{%- set content = text(m.content) -%}
    {%- if m.reasoning_content is string -%}{%- set thought = m.reasoning_content -%}
    {%- elif '</think>' in content -%}
      {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- ('<think>' + thought.strip() + '</think>') if loop.index0 > ns.user and thought else '</think>' -}}
    {{- content.strip() -}}
    {%- for call in m.tool_calls -%}
      {%- set call = call.function -%}{{ '<tool_call>' + call.name }}
      {%- for key, value in call.arguments.items() -%}
        <arg_key>{{ key }}</arg_key><arg_value>{{ value if value is string else value | tojson(ensure_ascii=False) }}</arg_value>
      {%- endfor -%}</tool_call>
    {%- endfor -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
  {{- '</think>' if enable_thinking is defined and not enable_thinking else '<think>' -}}
{%- endif -%}"""

# As Qwen2.5 writes calls, and schemas as templates that write them in a language of types
JSON_CALLS = """{%- for tool in tools or [] -%}
  {%- for name, schema in tool.function.parameters.properties.items() -%}
    {{ name }}{{ '' if name in tool.function.parameters.required else '?' }}: {{ 'str' if schema.type == 'string' else 'other' }};
  {%- endfor -%}
{%- endfor -%}
{%- for m in messages -%}<|im_user|>{{ m.content }}
  {%- for call in m.tool_calls -%}
    {"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
  {%- endfor -%}
{%- endfor -%}"""
SOURCES = {"v31": V31, "r1": R1, "kimi": KIMI, "glm": GLM, "json": JSON_CALLS}


def deepseek_tokenizer() -> Tokenizer:
    """Bytes, and the control tokens of all these templates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([BOS, EOS])
    texts = f"{DEEPSEEK} {KIMI_TOKENS} {GLM_TOKENS}".split()
    model.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in texts])
    return Tokenizer(model, None)


def template(name: str) -> ChatTemplate:
    return ChatTemplate(SOURCES[name], "chat_template.jinja", {"bos_token": BOS, "eos_token": EOS})


def marked(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of `ids` with every control token between guillemets, so that it differs from a typed one."""
    names = {i: f"«{text}»" for text, i in tokenizer.control.items()}
    return b"".join(names[i].encode() if i in names else tokenizer.piece(i) for i in ids).decode()
