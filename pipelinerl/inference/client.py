async def score_tokens(session, url, token_ids):
    raise NotImplementedError
