"""LangGraph with LangChain's client of OpenAI: a graph of the model and its tools. One asks the model itself."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from task import CRITIC, MAX_ANSWERS, OPTIONS, QUESTION, SYSTEM, submit

model = ChatOpenAI(model="policy", streaming=OPTIONS.stream, use_responses_api=OPTIONS.api == "responses")


@tool
def ask_critic(input: str) -> str:
    """Ask whether an answer is plausible."""
    return model.invoke([("system", CRITIC), ("user", input)]).text


tools = [tool(submit), ask_critic]
bound = model.bind_tools(tools)


def answer(state: MessagesState) -> dict:
    return {"messages": [bound.invoke(state["messages"])]}


builder = StateGraph(MessagesState)
builder.add_node("model", answer)
builder.add_node("tools", ToolNode(tools))
builder.add_edge(START, "model")
builder.add_conditional_edges("model", tools_condition)
builder.add_edge("tools", "model")
graph = builder.compile()
asked = {"messages": [("system", SYSTEM), ("user", QUESTION)]}
try:
    for _ in graph.stream(asked, {"recursion_limit": 2 * MAX_ANSWERS}, stream_mode="messages"):
        pass
except GraphRecursionError as error:
    print(f"given up: {error}")
