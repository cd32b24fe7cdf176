"""What a client asks for is what the workers are told."""

import router_fakes as fakes

from pdmesh.text.tokenizer import load_tokenizer
from pdmesh.wire import chat_pb2
from pdmesh.wire.messages import PrefillRequest, StreamRequest

TOKENIZER = load_tokenizer(fakes.MODEL_PATH)


async def test_what_shapes_the_answer_reaches_both_workers(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        request = chat_pb2.ChatRequest(
            prompt_token_ids=[5],
            response_format=chat_pb2.ResponseFormat(json_object=True),
            sampling=chat_pb2.Sampling(
                max_tokens=4,
                top_k=9,
                min_p=0.25,
                repetition_penalty=1.5,
                frequency_penalty=-1.0,
                presence_penalty=0.5,
                logit_bias={9: 2.0, 3: -1.0},
                min_tokens=2,
                bad_words=["crow", " crow", "sea"],
            ),
        )
        await mesh.chat(request)
        (prefill,) = mesh.prefill[0].seen(PrefillRequest)
        (stream,) = mesh.decode[0].seen(StreamRequest)
        sent = prefill.sampling
        assert sent == stream.sampling
        assert (sent.top_k, sent.min_p, sent.min_tokens) == (9, 0.25, 2)
        penalties = sent.repetition_penalty, sent.frequency_penalty, sent.presence_penalty
        assert penalties == (1.5, -1.0, 0.5)
        assert sent.logit_bias == ((3, -1.0), (9, 2.0))
        banned = ["crow", " crow", "sea", " sea"]
        assert sent.bad_words == tuple(tuple(TOKENIZER.encode(word)) for word in banned)
        assert "json_schema" in sent.grammar


async def test_free_text_has_no_grammar(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        await mesh.chat(max_tokens=2)
        assert mesh.prefill[0].seen(PrefillRequest)[0].sampling.grammar == ""


async def test_a_stop_string_before_min_tokens_does_not_end_the_answer(tmp_path):
    story = TOKENIZER.encode("one two three two four")
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        for worker in mesh.workers:
            worker.answer = story
        answer = await mesh.chat(max_tokens=len(story), stop=["two"])
        assert answer.text == "one "
        least = answer.usage.completion_tokens + 1
        answer = await mesh.chat(max_tokens=len(story), stop=["two"], min_tokens=least)
        assert (answer.text, answer.reason) == ("one two three ", "stop")


async def test_end_of_text_ends_an_answer_with_a_grammar_also_where_it_is_ignored(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        request = fakes.ask(max_tokens=4, ignore_eos=True)
        await mesh.chat(request)
        request.response_format.regex = "(yes|no)"
        await mesh.chat(request)
        told = [seen.eos_token_ids for seen in mesh.prefill[0].seen(PrefillRequest)]
        assert told == [(), TOKENIZER.ids.eos]
